"""From a module and example inputs to a captured program, and what that program is valid for."""
