"""A stand-in for SGLang, with its module and class names and the faults that Dislodge exists for. None of it is SGLang's code:
the real releases are exercised by the agent's tests."""

__version__ = "0.0.0+standin"
