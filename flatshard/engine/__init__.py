"""What happens to a unit during a training step. Each package imports only those above it in this list.

    program, steps   the order of all-gathers and reduces; the number of optimizer steps
    parameters       a parameter in all its forms
    weights          where full weights come from
    gradients        from autograd's gradients to reduced ones
    groups           the parameters that are communicated together, and changes that users make to them
    rows             embeddings by rows
    watch            hooks that follow a backward
    units            one `fully_shard` call: its hooks and phases
    schedule         what the units of one root share, including optional units
    tree             from modules to units and roots

A training step of ZeRO 3 uses units/unit.py, units/leases.py, schedule/root.py, schedule/gathers.py,
groups/param_group.py, weights/source.py, watch/calls.py, gradients/gradients.py and schedule/reduces.py. It does not
use rows, formats, optional units and direct gradients.
"""
