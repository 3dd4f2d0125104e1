"""`tamis remote`: set up, start, watch, stop and fetch runs on other machines over OpenSSH.

What runs on the laptop needs Python alone: no torch, no package. `sender` runs on the other machine.
"""
