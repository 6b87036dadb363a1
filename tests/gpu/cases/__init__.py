"""What the stand-in must do, case by case. Each is a function that raises if it does not.

    python -m tests.gpu.cases streams.a_stream_works_in_order

A case runs in a process of its own: it loads the stand-in, freezes streams and breaks devices.
test_standin.py runs them all.
"""
