"""Two soft-RoCE devices with a cable in between, their counters, and faults that are real."""

import subprocess
from pathlib import Path

from processes import until

# Prefill's and decode's device, the link that it is on, and its address.
DEVICES = {"prefill": ("rxe0", "veth0", "10.0.0.1"), "decode": ("rxe1", "veth1", "10.0.0.2")}


def run(commands):
    for command in commands.strip().splitlines():
        subprocess.run(command.split(), check=True)


def make_devices():
    """Two RDMA devices with a cable in between.

    Both ends are in one namespace, because soft-RoCE of these kernels knows no other; so what is sent to the other end must be
    kept from taking the way that local addresses have: it would never reach the cable, and no fault would reach it.
    """
    if port("rxe0").exists():
        return
    run("ip link add veth0 type veth peer name veth1")
    for (device, link, address), (_, _, other) in (DEVICES.values(), reversed(DEVICES.values())):
        for setting in ("accept_local=1", "rp_filter=0"):
            run(f"sysctl -qw net.ipv4.conf.{link}.{setting}")
        run(f"""
            ip addr add {address}/32 dev {link}
            ip link set {link} up
            ip route add {other}/32 dev {link} src {address}
            ip rule add pref 10 iif {link} lookup local
        """)
    run("""
        ip rule add pref 10 to 127.0.0.0/8 lookup local
        ip rule add pref 40000 lookup local
        ip rule del pref 0
    """)
    for device, link, _ in DEVICES.values():
        run(f"rdma link add {device} type rxe netdev {link}")
        wait_for_port(device, "ACTIVE")


def port(device):
    return Path(f"/sys/class/infiniband/{device}/ports/1")


def wait_for_port(device, state):
    until(f"{device} to be {state}", lambda: (port(device) / "state").read_text().strip().endswith(state))


def counters(device="rxe0"):
    """The device's own counts of packets, retries and errors since it was made."""
    return {file.name: int(file.read_text()) for file in sorted((port(device) / "hw_counters").iterdir()) if file.name != "lifespan"}


def changed(before, device="rxe0"):
    """Those counters that changed, and by how much."""
    return {name: count - before[name] for name, count in counters(device).items() if count != before[name]}


def lose_everything():
    """From now on nothing arrives at decode, and no device learns of it: what is posted is tried again until its retries are used up."""
    run("tc qdisc replace dev veth0 root netem loss 100%")


def lose_some():
    """From now on one packet in a hundred to decode is lost, and has to be sent again."""
    run("tc qdisc replace dev veth0 root netem loss 1%")


def delay(milliseconds):
    """From now on each packet to decode takes that much longer."""
    run(f"tc qdisc replace dev veth0 root netem delay {milliseconds}ms limit 100000")


def lose_nothing():
    run("tc qdisc del dev veth0 root")


def link_down():
    """Unplugs the cable: both ports go down, and who watches them is told."""
    run("ip link set veth0 down")
    wait_for_port("rxe0", "DOWN")


def link_up():
    run("""
        ip link set veth0 up
        ip route replace 10.0.0.2/32 dev veth0 src 10.0.0.1
    """)
    for device, _, _ in DEVICES.values():
        wait_for_port(device, "ACTIVE")
