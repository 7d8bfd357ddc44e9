"""What this node reports of itself: ``host`` reads its processors, memory and disks, ``gpu`` its GPUs, and
``executor`` carries out ``node.facts``, which gives both to a playbook."""
