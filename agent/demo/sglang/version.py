"""Stand-in: the release whose faults this package has, marked as not being it."""

__version__ = "0.5.22+demo"
