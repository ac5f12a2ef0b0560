"""From a plan and a captured program to finished programs: no ranks, nothing compiled."""
