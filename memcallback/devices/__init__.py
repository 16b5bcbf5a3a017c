"""Devices: the catalogue of cards, the devices of this machine, and their use now.

May import `core`. Start with `resolve` in `local`, which turns whatever a user names into a device.
A new card goes into `catalogue`; a new kind of device needs a meter in `meters`.
"""
