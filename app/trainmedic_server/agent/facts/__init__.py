"""What this node reports of itself: ``host`` reads its processors, memory and disks, ``gpu`` its GPUs, and
``hand`` is the action ``node.facts``, which tells both to a playbook."""
