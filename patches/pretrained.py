"""What every pretrained class of ours has: how it is initialised, loaded, and saved with the code that runs it."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers import initialization as init
from transformers.dynamic_module_utils import get_relative_import_files

from .errors import RetrofitError

# what the mixins stand in front of: a family's class, known to the type checker as any pretrained model
if TYPE_CHECKING:
    from transformers import PreTrainedModel as Host
else:
    Host = object


class MemoryField(PretrainedConfig):
    """Mixin behind a family's configuration: ``memory``, a mapping as ``MemoryConfig.to_dict`` writes it."""

    _auto_class = "AutoConfig"
    memory: dict[str, Any] | None = None


class MemoryPreTrained(Host):
    """What every PreTrainedModel of the tree needs: transformers asks the nearest one how to initialise and to cast."""

    _keep_in_fp32_modules_strict = ["memory"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; tensor parallelism is refused, since a memory is not split by heads."""
        refuse_tensor_parallel(kwargs)
        return super().from_pretrained(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        if getattr(module, "is_retrofit_memory", False):
            module.reset_parameters()  # type: ignore[operator]
            return
        super()._init_weights(module)
        rounded = (self.config.memory or {}).get("rotary_dtype")
        if rounded and hasattr(module, "inv_freq"):
            for frequencies in (module.inv_freq, module.original_inv_freq):
                assert isinstance(frequencies, Tensor)
                init.copy_(frequencies, frequencies.to(getattr(torch, rounded)).to(frequencies.dtype))

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the code that runs it beside the weights; all three Auto classes find it."""
        given = inspect.signature(super().save_pretrained).bind(*args, **kwargs)
        if given.arguments.get("push_to_hub"):
            raise RetrofitError("push_to_hub would leave out code: save first, then call push_to_hub(repo_id)")
        family, prefix = type(self).__module__.rpartition(".")[2], type(self.config).__name__.removesuffix("Config")
        self.config.auto_map = {
            "AutoConfig": f"{family}.{prefix}Config",
            "AutoModel": f"{family}.{prefix}Model",
            "AutoModelForCausalLM": f"{family}.{prefix}ForCausalLM",
        }
        super().save_pretrained(*given.args, **given.kwargs)
        if given.arguments.get("is_main_process", True):
            name_every_file(Path(given.arguments["save_directory"]), family)


def refuse_tensor_parallel(kwargs: dict[str, Any]) -> None:
    """Refuse the arguments of ``from_pretrained`` that ask for tensor parallelism.

    Raises:
        RetrofitError: they do.
    """
    if kwargs.get("tp_plan") is not None or kwargs.get("tp_size") is not None:
        raise RetrofitError(
            "tensor parallelism would split the heads but not the memory: load the model without tp_plan"
        )


def name_every_file(folder: Path, family: str) -> None:
    """Let an exported family file import each file beside it.

    Loading from a folder, the first releases of transformers 5 copy only the files which that one names itself, not
    the files that those need in turn.
    """
    entry = folder / f"{family}.py"
    text = entry.read_text(encoding="utf-8")
    names = sorted({Path(file).stem for file in get_relative_import_files(entry)})
    missing = [name for name in names if f"from .{name} " + "import" not in text]
    if missing:
        lines = "".join(f"from .{name} " + f"import __name__ as _{name}  # noqa\n" for name in missing)
        entry.write_text(
            f"{text}\n# older transformers copy only the files that this one names\n{lines}", encoding="utf-8"
        )
