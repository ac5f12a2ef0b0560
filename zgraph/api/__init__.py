"""The functions that users call: compile, verify, calibrate, and the methods of `model.zgraph`."""
