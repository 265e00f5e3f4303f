"""Gives Python a clock that stands still unless somebody says that time passes: what is measured by it is the same on every machine.

Python runs this before anything else where it finds it.
"""

import time


class Clock:
    now = 0


def pass_time(ns):
    Clock.now += ns


time.perf_counter_ns = lambda: Clock.now
