"""``/sys`` and ``/proc`` of a healthy node as directories: an Ethernet and an InfiniBand card, an NVMe and a SCSI disk.

Files have the kernel's names, texts and links. Not modelled: what reading does to a device, and files that the health
checks do not read.
"""

from __future__ import annotations

from pathlib import Path

PORT = "mlx5_0/1"
_MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
23 22 0:21 / /proc rw,nosuid - proc proc rw
30 22 8:1 / /scratch\\040disk rw,noatime - xfs /dev/sda1 rw,attr2,inode64
31 22 8:1 /home /home rw,noatime - xfs /dev/sda1 rw,attr2,inode64
32 22 7:1 / /snap/core ro,nodev - squashfs /dev/loop1 ro
33 22 259:2 /etc /mnt/config ro,relatime - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
"""
_LINK = {"current_link_width": "16", "max_link_width": "16", "current_link_speed": "32.0 GT/s PCIe"}


class NodeTree:
    def __init__(self, root: Path) -> None:
        self.sys, self.proc = root / "sys", root / "proc"
        self.write("proc/self/mountinfo", _MOUNTS)
        self._ethernet()
        self._infiniband()
        self._disks()
        self.write("sys/class/net/lo/operstate", "unknown")
        for name, count in {"nvme0n1p2": "0", "loop1": "0"}.items():
            self.write(f"sys/fs/ext4/{name}/errors_count", count)
        self.write("sys/fs/ext4/features/lazy_itable_init", "supported")
        self.write(
            "sys/fs/btrfs/0d1c/devinfo/1/error_stats",
            "write_errs 0\nread_errs 0\nflush_errs 0\ncorruption_errs 0\ngeneration_errs 0",
        )

    @property
    def root(self) -> Path:
        return self.sys.parent

    def write(self, name: str, content: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")

    def _card(self, slot: str, most: int = 16) -> str:
        """A PCI device behind a bridge, whose slot has `most` lanes."""
        bridge = f"sys/devices/pci0000:{slot}/0000:{slot}:01.0"
        self.write(f"{bridge}/max_link_width", most)
        self.write(f"{bridge}/max_link_speed", "32.0 GT/s PCIe")
        for name, content in {**_LINK, "max_link_speed": "32.0 GT/s PCIe"}.items():
            self.write(f"{bridge}/0000:{slot}:02.0/{name}", content)
        return f"{bridge}/0000:{slot}:02.0"

    def _linked(self, link: str, target: str) -> None:
        (self.root / link).parent.mkdir(parents=True, exist_ok=True)
        (self.root / link).symlink_to(self.root / target)

    def _ethernet(self) -> None:
        self.ethernet = self._card("10")
        interface = f"{self.ethernet}/net/eth0"
        files = {"operstate": "up", "speed": "100000", "flags": "0x1003", "type": "1", "carrier_down_count": "1"}
        files |= {"statistics/rx_crc_errors": "0", "statistics/rx_frame_errors": "0"}
        for name, content in files.items():
            self.write(f"{interface}/{name}", content)
        self._linked(f"{interface}/device", self.ethernet)
        self._linked("sys/class/net/eth0", interface)

    def _infiniband(self) -> None:
        self.infiniband = self._card("20")
        device = f"{self.infiniband}/infiniband/mlx5_0"
        files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"}
        counters = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")
        files |= {f"counters/{name}": "0" for name in counters}
        for name, content in files.items():
            self.write(f"{device}/ports/1/{name}", content)
        self._linked(f"{device}/device", self.infiniband)
        self._linked("sys/class/infiniband/mlx5_0", device)
        for name, content in {"operstate": "down", "flags": "0x1003", "type": "32"}.items():
            self.write(f"{self.infiniband}/net/ib0/{name}", content)
        self._linked(f"{self.infiniband}/net/ib0/device", self.infiniband)
        self._linked("sys/class/net/ib0", f"{self.infiniband}/net/ib0")

    def _disks(self) -> None:
        self.nvme = self._card("30", most=4)
        self.write(f"{self.nvme}/current_link_width", 4)
        self.write(f"{self.nvme}/nvme/nvme0/state", "live")
        self._linked(f"{self.nvme}/nvme/nvme0/device", self.nvme)
        self.write(f"{self.nvme}/nvme/nvme0/nvme0n1/size", 7501476528)
        self._linked(f"{self.nvme}/nvme/nvme0/nvme0n1/device", f"{self.nvme}/nvme/nvme0")
        self._linked("sys/block/nvme0n1", f"{self.nvme}/nvme/nvme0/nvme0n1")
        self.write("sys/block/sda/device/state", "running")
        self.write("sys/block/sda/device/ioerr_cnt", "0x2")
        self.write("sys/block/md0/md/degraded", 0)
        self.write("sys/block/loop1/size", 8)

    # --- what happens ------------------------------------------------------------------------------------

    def interface(self, **files: object) -> None:
        for name, content in files.items():
            self.write(f"{self.ethernet}/net/eth0/{name}", content)

    def port(self, **files: object) -> None:
        for name, content in files.items():
            self.write(f"sys/class/infiniband/mlx5_0/ports/1/{name}", content)

    def count(self, **counters: int) -> None:
        """These counters of the InfiniBand port."""
        self.port(**{f"counters/{name}": count for name, count in counters.items()})

    def remount_read_only(self) -> None:
        """The root file system, after an error."""
        self.write("proc/self/mountinfo", _MOUNTS.replace("nvme0n1p2 rw", "nvme0n1p2 ro").rstrip())
