"""What a user calls: compile, verify, calibrate, and `model.zgraph`."""
