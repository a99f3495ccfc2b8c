"""``retrofit demo``: a text and a teacher made on the spot, and memories fitted to it."""
