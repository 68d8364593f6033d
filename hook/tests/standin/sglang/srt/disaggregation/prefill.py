"""Stand-in: the scheduler's pass over its inflight queue."""

from typing import List, Optional

from sglang.srt.disaggregation.base.conn import KVPoll


class SchedulerDisaggregationPrefillMixin:
    def process_disagg_prefill_inflight_queue(self, rids_to_check: Optional[List[str]] = None) -> list:
        if not self.disagg_prefill_inflight_queue:
            return []
        done, undone = [], []
        polls = [req.disagg_kv_sender.poll() for req in self.disagg_prefill_inflight_queue]
        for req, poll in zip(self.disagg_prefill_inflight_queue, polls):
            if poll == KVPoll.Success:
                req.disagg_kv_sender.clear()
                done.append(req)
            elif poll == KVPoll.Failed:
                try:
                    req.disagg_kv_sender.failure_exception()
                except Exception as error:
                    req.error = error
                done.append(req)
            else:
                undone.append(req)
        self.disagg_prefill_inflight_queue = undone
        return done
