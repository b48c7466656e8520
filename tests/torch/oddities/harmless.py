"""Objects that are no obstacle: they hold no state, or one that can be captured."""

from __future__ import annotations

import functools
import tempfile
import threading
from typing import Any

import numpy as np
import pydantic
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from tests.torch.oddities.oddity import Odd, odd


class Settings(pydantic.BaseModel):
    steps: int = 0
    names: list[str] = []
    _hidden: int = pydantic.PrivateAttr(0)


@odd("a model of pydantic's", Settings)
def _(kept: Any, self: Odd) -> float:
    kept.steps += 1
    kept.names.append("a")
    kept._hidden += 2
    return kept.steps + len(kept.names) + kept._hidden + len(kept.model_fields_set)


@odd("a model of pydantic's that training makes")
def _(kept: Any, self: Odd) -> float:
    self.kept = Settings(steps=1 if kept is None else kept.steps + 1)
    return self.kept.steps


@pydantic.dataclasses.dataclass
class Point:
    x: float = 0.0


@odd("a data class of pydantic's", Point)
def _(kept: Any, self: Odd) -> float:
    kept.x += 1
    return kept.x


@odd("a writer for TensorBoard", lambda: SummaryWriter(tempfile.mkdtemp()))
def _(kept: Any, self: Odd) -> float:
    kept.add_scalar("loss", 0.5, self.steps)
    return 1


WRITER = SummaryWriter(tempfile.mkdtemp())


@odd("a writer for TensorBoard, of the module's")
def _(kept: Any, self: Odd) -> float:
    WRITER.add_scalar("loss", 0.5, self.steps)
    return 1


HELD = threading.local()


@odd("a global variable of this thread's, only read")
def _(kept: Any, self: Odd) -> float:
    return getattr(HELD, "depth", 1)


REST = ...


@odd("an ellipsis", lambda: [..., NotImplemented])
def _(kept: Any, self: Odd) -> float:
    kept.append(REST)
    return sum(item is ... for item in kept)


@odd("texts of numpy's", lambda: [np.str_("a"), np.bytes_(b"b"), np.datetime64("2020-01-01"), np.timedelta64("NaT")])
def _(kept: Any, self: Odd) -> float:
    kept[0] = np.str_(str.__str__(kept[0]) + "a\0")
    kept[1], kept[2] = np.bytes_(kept[1] + bytes(1)), kept[2] + np.timedelta64(1, "D")
    kept.append(np.str_("a" * self.steps))
    return len(kept[0]) + len(kept[1]) + int(kept[2].astype(int)) / 1e4 + len(kept[-1])


@functools.cache
def squared(x: int) -> int:
    return x * x


@functools.cache
def table(size: int) -> tuple[float, ...]:
    return tuple(np.linspace(0, 1, size).tolist())


noise = functools.partial(np.random.default_rng, 3)


@odd("caches of functions, and names like noise")
def _(kept: Any, self: Odd) -> float:
    seed_noise = noise().normal()
    return squared(self.steps) + sum(table(self.steps + 2)) + seed_noise


@odd("images of Pillow", lambda: [Image.new("L", (4, 3), 30), Image.new("P", (2, 2)), Image.new("F", (0, 2))])
def _(kept: Any, self: Odd) -> float:
    kept.append(kept[0])
    return float(np.asarray(kept[-1]).sum()) + len(kept) + sum(kept[1].convert("RGB").getpixel((1, 1)))
