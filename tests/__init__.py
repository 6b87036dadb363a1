"""The tests of gflow. They are a package so that ranks can import a test's functions by name."""
