"""What happens to a unit during a training step. One room per subject; each imports those before it, and no other.

    program, steps   in which order units are gathered and groups reduced; which optimizer step it is
    parameters       a parameter in all its forms
    weights          where full weights come from
    gradients        from autograd's gradients to reduced ones
    groups           the parameters that travel together, and what users do to them
    rows             embeddings by rows
    watch            where a backward stands
    units            one `fully_shard` call: its hooks and phases
    schedule         what the units of one root share, optional units among it
    tree             from modules to units and roots

A training step of ZeRO 3 goes through units/unit.py, schedule/root.py, groups/param_group.py, weights/source.py,
watch/calls.py, gradients/gradients.py and schedule/reduces.py, and needs nothing of rows, formats, optional units and
direct gradients.
"""
