"""What Fedveil costs and how exact it is: `python -m benchmarks`, or `python -m benchmarks.NAME` for one."""
