"""TensorBoard: event files in the run directory, which `tensorboard --logdir runs` finds."""

import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_END_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import hparams

from fedshift.track.base import About, How, Rounds

FOLDER = "tensorboard"
STATUS = {"finished": "STATUS_SUCCESS", "stopped": "STATUS_UNKNOWN", "failed": "STATUS_FAILURE"}


class TensorBoard:
    """Write events immediately and close the file; the threads of TensorBoard's own writers fail silently."""

    def __init__(self, run: About, kept: Mapping[str, Any]) -> None:
        self.kept: dict[str, Any] = {}
        self.after = min(kept.get("round", 0), run.now - 1)
        self.settings, self.known = run.settings, bool(kept)
        folder, now = run.folder / FOLDER, time.time_ns()
        folder.mkdir(exist_ok=True)
        # files are read in the order of their names
        self.file = folder / f"events.out.tfevents.{now // 10**9:010}.{now % 10**9:09}.{socket.gethostname()}"
        begin = [Event(file_version="brain.Event:2")]
        if kept:  # discard logged values of later rounds
            begin.append(Event(step=self.after + 1, session_log=SessionLog(status=SessionLog.START)))
        self._write(begin)

    def add(self, rounds: Rounds) -> None:
        self._write(self._events(rounds))

    def _events(self, rounds: Rounds) -> Iterator[Any]:
        for number, figures in rounds.items():
            if not self.known:  # once: settings, with the metrics for their comparison
                scores = {name: 0.0 for name in figures if name.startswith("test/")}
                for summary in hparams(self.settings, scores)[:2]:  # type: ignore[no-untyped-call]
                    yield Event(summary=summary)
                self.known = True
            values = [Summary.Value(tag=name, simple_value=figure) for name, figure in figures.items()]
            yield Event(step=number, summary=Summary(value=values))

    def end(self, how: How) -> None:
        self._write([Event(summary=ended(how))])

    def _write(self, events: Any) -> None:
        with open(self.file, "ab") as file:
            writer = RecordWriter(file)
            for event in events:
                event.wall_time = time.time()
                writer.write(event.SerializeToString())


def ended(how: How) -> Any:
    """Summary that ends a session for the HParams page; torch writes only successful ones."""
    session = HParamsPluginData(session_end_info=SessionEndInfo(status=Status.Value(STATUS[how])))
    session.version = PLUGIN_DATA_VERSION
    data = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=session.SerializeToString())
    return Summary(value=[Summary.Value(tag=SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=data))])


TRACKER = TensorBoard
