"""Devices: the known cards, the devices of this machine, and their use now.

May import `core`. Start with `resolve` in `local`, which turns whatever a user names into a device.
A new card goes into `cards`, where `catalogue` looks it up; a new kind of device needs a meter in
`meters`.
"""
