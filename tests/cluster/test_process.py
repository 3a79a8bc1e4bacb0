"""What a worker's process does without Ray."""

import logging
import threading

from rlx.cluster.process import _Collector


def test_a_record_that_another_thread_logs_while_records_are_taken_is_in_the_next_answer():
    """A checkpoint is written in a thread, which logs when it likes."""
    collector, text = _Collector(), "%s"
    late = logging.LogRecord("rlx.late", logging.INFO, "", 0, text, ("late",), None)
    thread = threading.Thread(target=collector.handle, args=[late])

    class Records(list):
        def __iter__(self):
            yield from super().__iter__()
            thread.start()
            thread.join(1.0)  # it may have to wait until the records are taken

    collector.records = Records([(logging.INFO, "rlx", "early")])
    first = collector.take()
    thread.join()
    assert [*first, *collector.take()] == [(logging.INFO, "rlx", "early"), (logging.INFO, "rlx.late", "late")]
