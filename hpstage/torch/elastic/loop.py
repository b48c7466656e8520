"""ElasticLoop: trains a TorchTrainable by virtual nodes, alone or as one process of a gang."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import GangLost, StateError, UsageError
from hpstage.schedule import Scalar
from hpstage.torch.backends.backend import StepBackend
from hpstage.torch.data import Batches
from hpstage.torch.elastic.gang import Gang, LeaderLeft, Order
from hpstage.torch.elastic.group import Meeting
from hpstage.torch.elastic.virtual_nodes import VirtualNodes
from hpstage.torch.loop import TorchLoop
from hpstage.torch.trainable import TorchTrainable
from hpstage.training.randomness import seed_of

logger = logging.getLogger("hpstage")


class ElasticLoop(TorchLoop):
    """The training loop of one TorchTrainable with ``virtual_nodes`` above 1: an :class:`~hpstage.trainable.Elastic`.

    In a gang, all processes train the same steps and so are in the same state after each. An exception of the user's
    code in a virtual node is raised in the leader, as without a gang, whichever process trains the node.
    """

    def __init__(self, subject: TorchTrainable) -> None:
        super().__init__(subject)
        _see_usable(subject)
        self.virtual_nodes = subject.virtual_nodes
        self._nodes = VirtualNodes(subject, self.device, self._count)
        self._gang: Gang | None = None
        self._meeting: Meeting | None = None
        self._at_setup: dict[str, str] = {}
        self._before = 0  # samples consumed before the batch
        self._alone_seconds = 0.0

    # --- the port of gangs --------------------------------------------------------------------------------

    def open_gang(self, host: str) -> str:
        self._meeting = Meeting.open(host)
        return self._meeting.address

    def lead(self, size: int, timeout: float, in_vain: Callable[[], bool] = lambda: False) -> None:
        assert self._meeting is not None, "open_gang() comes first"
        meeting, self._meeting = self._meeting, None
        self._join(meeting, 0, size, timeout, in_vain)

    def follow(self, address: str, rank: int, size: int, timeout: float) -> str:
        began = time.monotonic()
        meeting = Meeting.find(address, timeout)
        gang = self._join(meeting, rank, size, max(1.0, timeout - (time.monotonic() - began)))
        try:
            while isinstance(order := gang.obey(), Order):
                self._obey(gang, order)
            return order
        finally:
            self._leave()

    def dismiss(self, word: str) -> None:
        if self._gang is not None:
            self._gang.stop(word)
        self._leave()

    def shared_seconds(self) -> float:
        seconds, self._alone_seconds = self._alone_seconds, 0.0
        return seconds

    def _join(
        self, meeting: Meeting, rank: int, size: int, timeout: float, in_vain: Callable[[], bool] = lambda: False
    ) -> Gang:
        with closing(meeting):
            if not 1 <= size <= self.virtual_nodes or size & (size - 1):
                raise UsageError(
                    f"a gang of {size} cannot train {self.virtual_nodes} virtual nodes: the number of processes must "
                    f"be a power of two, and at most the number of nodes"
                )
            built = self._ready()
            gang = Gang(meeting.form(rank, size, timeout, in_vain), self.virtual_nodes)
        weights = [tensor.detach() for tensor in (*built.model.parameters(), *built.model.buffers())]
        gang.greet(
            f"sample {self._samples}, with {self.virtual_nodes} virtual nodes and weights whose digest is "
            f"{digest(weights)[:12]}"
        )
        self._gang, self._nodes.own, self._nodes.exchange = gang, gang.own, gang.exchange
        return gang

    def _leave(self) -> None:
        if self._meeting is not None:
            self._meeting.close()  # stop waiting for others
            self._meeting = None
        if self._gang is not None:
            self._gang.close()
            self._gang, self._nodes.own, self._nodes.exchange = None, range(self.virtual_nodes), None

    def _obey(self, gang: Gang, order: Order) -> None:
        """Do the same as the leader. If the leader raises the same exception, only the leader reports it."""
        try:
            if order.hp is None:
                self._looked_at(gang)
            else:
                self._train(order.step, order.hp)
        except GangLost:
            raise
        except LeaderLeft:
            logger.debug("the leader of the gang has left step %d", order.step)
        except Exception as error:
            logger.debug("step %d of a gang has failed", order.step, exc_info=True)
            gang.left(error)
        gang.end_step()

    # --- the port of trainables ---------------------------------------------------------------------------

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        gang, began = self._gang, time.perf_counter()
        own, waited = self._nodes.seconds, 0.0 if gang is None else gang.waited
        if gang is None:
            self._train(step, hp)
            self._alone_seconds += time.perf_counter() - began
            return
        try:
            gang.order(Order(step, dict(hp)))
            self._train(step, hp)
        except GangLost:
            self._leave()
            raise
        except Exception as error:
            gang.left(error)
            raise
        gang.end_step()
        alone = time.perf_counter() - began - (gang.waited - waited)
        self._alone_seconds += alone + (self._nodes.seconds - own) * (gang.size - 1)

    def state_dict(self) -> object:
        """Return the state. In a gang, every process checks whether it can be captured: each has trained other nodes.

        Raises:
            StateError: training has changed what virtual nodes cannot share, or what cannot be captured.
            GangLost: a process is gone.
        """
        gang = self._gang
        if gang is None:
            return self._captured()
        try:
            gang.order(Order(0))
            state = self._looked_at(gang)
        except GangLost:
            self._leave()
            raise
        gang.end_step()
        return state

    def load_state_dict(self, state: object) -> None:
        assert self._gang is None, "the others of a gang would not load the state"
        super().load_state_dict(state)

    def rehearse(self, hp: Mapping[str, Scalar]) -> None:
        """Raise :class:`UsageError` if a first step, or a short batch, cannot be trained by virtual nodes."""
        self.setup(hp)
        try:
            self.train(0, hp)
            self.state_dict()
        except UsageError:
            raise
        except Exception:
            logger.debug("the first step of a rehearsal has failed", exc_info=True)  # training will raise it
        else:
            self._rehearse_short(hp)
        self.close()

    def _rehearse_short(self, hp: Mapping[str, Scalar]) -> None:
        """Train the last batch of an epoch if it is a short one: BatchNorm, for example, may not accept a single
        sample."""
        batches = self._data()
        rest = self._rest()
        if not rest or not isinstance(batches, Batches):
            return
        self._samples = batches.cut.population - rest
        try:
            self.train(1, hp)
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"{type(self._user).__name__}: the last batch of an epoch has {rest} samples, and "
                f"{self.virtual_nodes} virtual nodes cannot be trained on {rest // self.virtual_nodes} each ({error}): "
                f"leave the batch out, by a DataLoader with drop_last=True"
            ) from error

    def close(self) -> None:
        self._leave()
        super().close()

    def describe_environment(self) -> dict[str, str]:
        return {
            **super().describe_environment(),
            "numerics": VirtualNodes.numerics,
            "virtual nodes": str(self.virtual_nodes),
        }

    def _train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self._ready()
        self._before = self._samples
        self._nodes.begin_step(seed_of(hp), step)
        super().train(step, hp)

    def _looked_at(self, gang: Gang) -> object:
        """Return the state, if it can be captured in all processes of the gang."""
        state, refusal = None, None
        try:
            state = self._captured()
        except StateError as error:
            refusal = error
        gang.agree(refusal)
        return state

    def _captured(self) -> object:
        state = super().state_dict()
        path = next((path for path, text in self._besides(state).items() if self._at_setup.get(path) != text), None)
        if path is not None:
            raise StateError(
                f"{path} changes in training, and each of {self.virtual_nodes} virtual nodes would make its own "
                f"changes to it: keep it in a parameter or buffer of the model, or name it in `stateless` if training "
                f"does not depend on it"
            )
        return state

    def _besides(self, state: Any) -> dict[str, str]:
        """Describe the values of a state that virtual nodes would each change separately: all values but parameters and
        buffers, which are averaged, and the optimizer's own values, which change in one step for all nodes."""
        built, base = self._ready(), self._world.base
        assert base is not None
        averaged = {id(tensor) for tensor in (*built.model.parameters(), *built.model.buffers())}
        averaged |= {id(tensor) for group in built.optimizer.param_groups for tensor in group["params"]}
        values = {f"model.{name}": value for name, value in state["model"].items()} | state["values"]
        others = {path: value for path, value in values.items() if id(base.paths[path].obj) not in averaged}
        return {
            path: "changed" if path in state["changed"] else digest(others[path])
            for path in (*others, *state["changed"])
            if not path.startswith(("optimizer.", "optimizer["))
        }

    def _steps_by(self) -> StepBackend:
        return self._nodes

    def _build(self) -> None:
        super()._build()
        self._at_setup = self._besides(super().state_dict())

    def _apply_hp(self, hp: Mapping[str, Scalar]) -> None:
        super()._apply_hp(hp)
        size, nodes, name = self._batch_size, self.virtual_nodes, type(self._user).__name__
        if size % nodes:
            raise UsageError(
                f"{name}: the batch size is {size}, and {nodes} virtual nodes share each batch equally: give batch "
                f"sizes that are multiples of {nodes}"
            )
        rest = self._rest()
        if rest % nodes:
            raise UsageError(
                f"{name}: the last batch of an epoch has {rest} samples, and {nodes} virtual nodes share each batch "
                f"equally: leave it out, by a DataLoader with drop_last=True"
            )

    def _rest(self) -> int:
        """Return the number of samples of the last batch of an epoch if it is a short one; else 0."""
        batches = self._data()
        if not isinstance(batches, Batches) or batches.cut.end != "short":
            return 0
        return batches.cut.population % self._batch_size

    def _count(self) -> int | None:
        """Return the number of samples of the batch that was taken last, if it is known."""
        batches, before = self._data(), self._before
        self._before = self._samples
        return batches.cut.batch(before, self._batch_size)[1] if isinstance(batches, Batches) else None


def _see_usable(subject: TorchTrainable) -> None:
    """Raise :class:`UsageError` if this object cannot be trained by virtual nodes."""
    nodes, name = subject.virtual_nodes, type(subject).__name__
    if type(nodes) is not int or nodes < 1 or nodes & (nodes - 1):
        raise UsageError(f"virtual_nodes is {nodes!r}; it must be a power of two: 1, 2, 4, 8, ...")
    if subject.numerics != "eager":
        raise UsageError(
            f"{name} has virtual_nodes = {nodes} and numerics = {subject.numerics!r}: virtual nodes are trained "
            f"eagerly; give numerics = 'eager', or virtual_nodes = 1"
        )
    if type(subject).update is not TorchTrainable.update:
        raise UsageError(
            f"{name} overrides update() and has virtual_nodes = {nodes}: gradients are complete only after virtual "
            f"nodes have averaged them. Clip them with optimizer.register_step_pre_hook() in optimizer(), or give "
            f"virtual_nodes = 1"
        )
    if type(subject).extra_state is not TorchTrainable.extra_state:
        raise UsageError(
            f"{name} defines extra_state(), and virtual_nodes = {nodes}: each virtual node would make its own changes "
            f"to objects other than model and optimizer. Give virtual_nodes = 1"
        )
