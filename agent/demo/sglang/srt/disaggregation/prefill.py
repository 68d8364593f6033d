"""Stand-in for the scheduler's pass over its inflight queue. The third fault is what it has not: a deadline."""

import logging

from sglang.srt.disaggregation.base.conn import KVPoll


class SchedulerDisaggregationPrefillMixin:
    def process_disagg_prefill_inflight_queue(self, rids_to_check=None):
        """Polls each request; releases the pages of those that have ended, well or not."""
        done, undone = [], []
        for req in self.disagg_prefill_inflight_queue:
            status = req.disagg_kv_sender.poll()
            if status in (KVPoll.WaitingForInput, KVPoll.Transferring):
                undone.append(req)
                continue
            if status == KVPoll.Success:
                req.finished_reason = {"type": "length", "length": 0}
                req.disagg_kv_sender.clear()
            elif status == KVPoll.Failed:
                self.handle_inflight_transfer_failure(req)
            else:
                raise RuntimeError(f"Unexpected poll state {status} for req {req.rid} in inflight queue")
            self.release_kv_cache(req)
            done.append(req)
        if done:
            self.stream_output(done)
            self.disagg_prefill_inflight_queue = undone
        return done

    def handle_inflight_transfer_failure(self, req):
        message = f"Prefill transfer failed for request {req.rid=} {req.bootstrap_room=}"
        level = logging.WARNING
        try:
            req.disagg_kv_sender.failure_exception()
        except Exception as error:
            message += f" with exception {error}"
            if getattr(error, "is_from_another_rank", False):
                level = logging.DEBUG
        logging.log(level, message)
        req.finished_reason = {"type": "abort", "message": message, "status_code": 500}
