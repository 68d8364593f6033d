"""A stand-in for SGLang, for `dislodge demo`: the modules and classes that the hook looks for, under SGLang's names.

Written for Dislodge; none of it is SGLang's code. It behaves as SGLang 0.5.12 to 0.5.22 do where a request gets pinned in the
prefill's inflight queue, and does nothing else that a server does: no model, no GPU, no network, one process.
"""
