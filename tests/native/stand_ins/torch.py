"""A stand-in for torch: NIXL's Python package up to 1.3 imports it for two class names, and main memory needs nothing of it."""


class Tensor:
    pass


class device:
    pass
