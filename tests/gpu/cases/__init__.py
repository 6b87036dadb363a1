"""Test cases of the stand-in: functions that raise if it misbehaves.

    python -m tests.gpu.cases streams.a_stream_works_in_order

Each case runs in its own process: it loads the stand-in, freezes streams and breaks devices.
test_standin.py runs them all.
"""
