"""RankLog: sends this rank's points, and on rank zero logs the range over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

from memcallback.core.step_memory import DeviceMemory, StepMemory
from memcallback.devices.memory import usable_bytes
from memcallback.devices.meters import Meter
from memcallback.record.publisher import Publisher
from memcallback.record.rank_exchange import RankExchange, place_of
from memcallback.report.console import FULL
from memcallback.report.rank_values import RankValues, point_of
from memcallback.report.tags import rank_curves


class RankLog:
    """The points of a job's ranks; in a job of one process it does nothing.

    Attributes:
        steady_since: The number of the first steady step; None before it.
        steady: The last steady point of all ranks; None before the first.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.steady_since: int | None = None
        self.steady: RankValues | None = None
        self._publisher = publisher
        self._exchange = RankExchange.of_job()

    def receive(self) -> None:
        """Log the points that have arrived; print the first steady ones."""
        if self._exchange is None:
            return
        is_first = self.steady is None
        self._log(self._exchange.ready())
        if is_first and self.steady is not None:
            self._publisher.say(self.steady.to_text(), level=FULL)

    def send(
        self,
        step: StepMemory,
        predicted: StepMemory | None,
        number: int,
        *,
        meter: Meter,
        device: DeviceMemory,
        capacity_bytes: int | None,
    ) -> None:
        """Send a point of this rank; the capacity is by default that of its device."""
        if self._exchange is None:
            return
        if capacity_bytes is None:
            capacity_bytes = usable_bytes(
                meter.device, device.capacity_bytes, device.non_pytorch_bytes or 0
            )
        self._exchange.send(
            point_of(
                step,
                predicted,
                rank=self._exchange.rank,
                number=number,
                capacity_bytes=capacity_bytes,
                place=place_of(meter.device_name),
            )
        )

    def end(self) -> tuple[str, ...]:
        """Log the last points; on rank zero note why the other ranks are unknown, if they are."""
        if self._exchange is None:
            return ()
        self._log(self._exchange.end())
        problem = self._exchange.problem
        if problem is None and self.steady is None and self.steady_since is not None:
            problem = "they sent no values"
        if problem is None or self._exchange.rank != 0:
            return ()
        return (f"The memory of the other ranks is unknown: {problem}.",)

    def close(self) -> None:
        """Release the exchange."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _log(self, steps: Iterable[RankValues]) -> None:
        for ranks in steps:
            self._publisher.curves(rank_curves(ranks), ranks.number)
            if self.steady_since is not None and ranks.number >= self.steady_since:
                self.steady = ranks
