"""What Dislodge runs inside an SGLang server: it says what happens to each request, and fails one of a prefill on request.

Two ways in: SGLang (0.5.11 and later) calls `register` as a plugin; before that, `sitecustomize` calls
`importing.watch`. Either patches SGLang's modules when the server imports them, and nothing before that.

    importing ─► patching ─► wrappers, chunks, queues, scheduler ─► marks   (what happened, to the agent's probe)
                                              └─► control ─► state, remedy     (what the agent asks)

Nothing here may raise into the server, and nothing keeps a request, a sender or the scheduler alive.
"""

VERSION = "0.1.0"


def register():
    """The entry point of group `sglang.srt.plugins`. SGLang calls it before it makes the scheduler."""
    try:
        from . import importing

        importing.watch()
    except Exception:  # a plugin that raises is logged by SGLang; ours has nothing to say that helps the server
        pass
