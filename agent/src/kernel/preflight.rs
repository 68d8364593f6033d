//! What this machine allows, and what to do where it does not. Facts are gathered here; [`judge`] is pure.

use std::{fs, os::unix::fs::MetadataExt as _};

use serde::Serialize;

/// The inode of the initial pid namespace (`PROC_PID_INIT_INO` in `include/linux/proc_ns.h`).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Capabilities (`include/uapi/linux/capability.h`) that the agent uses, by number.
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// What was found on this machine.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Kernel release, as `uname -r` prints it.
    pub release: String,
    /// Architecture, as `uname -m` prints it.
    pub architecture: String,
    /// Whether the kernel has its types at hand (`/sys/kernel/btf/vmlinux`).
    pub btf: bool,
    /// Whether the kernel has uprobes.
    pub uprobes: bool,
    /// The effective capabilities, as a bit set.
    pub capabilities: u64,
    /// Whether the agent sees the pids that BPF sees.
    pub initial_pid_namespace: bool,
    /// Yama's `ptrace_scope`; nothing where the kernel has no Yama.
    pub ptrace_scope: Option<u32>,
    /// Kernel lockdown, as `/sys/kernel/security/lockdown` marks it.
    pub lockdown: Option<String>,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should be.
    Good,
    /// Something will be missing.
    Degraded,
    /// The agent cannot work like this.
    Bad,
}

/// One check with what it found and, where it matters, what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it ended.
    pub outcome: Outcome,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub fix: Option<String>,
}

impl Machine {
    /// Looks around. Whatever cannot be read counts as missing.
    pub fn inspect() -> Self {
        let uname = rustix::system::uname();
        let lockdown = fs::read_to_string("/sys/kernel/security/lockdown").ok();
        Self {
            release: uname.release().to_string_lossy().into_owned(),
            architecture: uname.machine().to_string_lossy().into_owned(),
            btf: fs::exists("/sys/kernel/btf/vmlinux").unwrap_or(false),
            uprobes: fs::exists("/sys/bus/event_source/devices/uprobe/type").unwrap_or(false),
            capabilities: capabilities(&fs::read_to_string("/proc/self/status").unwrap_or_default()),
            initial_pid_namespace: fs::metadata("/proc/self/ns/pid")
                .is_ok_and(|metadata| metadata.ino() == INITIAL_PID_NAMESPACE),
            ptrace_scope: fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
                .ok()
                .and_then(|text| text.trim().parse().ok()),
            lockdown: lockdown.and_then(|text| Some(text.split('[').nth(1)?.split(']').next()?.to_owned())),
        }
    }

    fn may(&self, capability: u32) -> bool {
        self.capabilities & (1 << capability) != 0
    }
}

/// The effective capabilities that `/proc/PID/status` names; none where it does not.
fn capabilities(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0)
}

/// Says what each finding means.
pub fn judge(machine: &Machine) -> Vec<Check> {
    let check = |name, good: bool, bad: Outcome, found: String, fix: &str| Check {
        name,
        outcome: if good { Outcome::Good } else { bad },
        found,
        fix: (!good).then(|| fix.to_owned()),
    };
    let yes = |good: bool| if good { "yes" } else { "no" }.to_owned();
    let bpf = machine.may(CAP_SYS_ADMIN) || (machine.may(CAP_BPF) && machine.may(CAP_PERFMON));
    vec![
        check(
            "kernel",
            version(&machine.release) >= (5, 15),
            Outcome::Bad,
            format!("{} on {}", machine.release, machine.architecture),
            "the BPF programs need Linux 5.15 or newer",
        ),
        check(
            "architecture",
            machine.architecture == "x86_64",
            Outcome::Bad,
            machine.architecture.clone(),
            "this build's programs read the registers of x86_64",
        ),
        check(
            "uprobes",
            machine.uprobes,
            Outcome::Bad,
            yes(machine.uprobes),
            "use a kernel built with CONFIG_UPROBE_EVENTS, and mount /sys",
        ),
        check("btf", machine.btf, Outcome::Degraded, yes(machine.btf), "use a kernel built with CONFIG_DEBUG_INFO_BTF"),
        check(
            "bpf rights",
            bpf,
            Outcome::Bad,
            yes(bpf),
            "run as root, or grant CAP_BPF and CAP_PERFMON (and CAP_SYS_ADMIN where the kernel asks for it)",
        ),
        check(
            "probe rights",
            machine.may(CAP_SYS_ADMIN),
            Outcome::Degraded,
            yes(machine.may(CAP_SYS_ADMIN)),
            "grant CAP_SYS_ADMIN: kernels with the fix for CVE-2025-38466 ask for it to attach a uprobe",
        ),
        check(
            "control rights",
            machine.may(CAP_SYS_PTRACE) && machine.ptrace_scope != Some(3),
            Outcome::Degraded,
            format!(
                "CAP_SYS_PTRACE {}, ptrace_scope {}",
                yes(machine.may(CAP_SYS_PTRACE)),
                machine.ptrace_scope.map_or("absent".to_owned(), |scope| scope.to_string())
            ),
            "grant CAP_SYS_PTRACE and set kernel.yama.ptrace_scope below 3: without it the hook's control channel is \
             out of reach, so a request pinned before the agent started is not seen, and nothing can be freed",
        ),
        check(
            "pid namespace",
            machine.initial_pid_namespace,
            Outcome::Bad,
            if machine.initial_pid_namespace { "the node's" } else { "another" }.to_owned(),
            "run in the node's pid namespace (hostPID: true): BPF names processes by it",
        ),
        check(
            "lockdown",
            machine.lockdown.as_deref() != Some("confidentiality"),
            Outcome::Bad,
            machine.lockdown.clone().unwrap_or_else(|| "none".to_owned()),
            "lockdown=confidentiality forbids BPF to read memory: boot with lockdown=integrity or none",
        ),
    ]
}

/// Major and minor of a kernel release; (0, 0) where it is not one.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|text| text.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Machine {
        Machine {
            release: "6.12.3-amd64".into(),
            architecture: "x86_64".into(),
            btf: true,
            uprobes: true,
            capabilities: u64::MAX,
            initial_pid_namespace: true,
            ptrace_scope: None,
            lockdown: None,
        }
    }

    fn outcome(machine: &Machine, name: &str) -> Outcome {
        judge(machine).iter().find(|check| check.name == name).unwrap().outcome
    }

    #[test]
    fn a_good_machine_has_nothing_to_fix() {
        assert!(judge(&good()).iter().all(|check| check.outcome == Outcome::Good && check.fix.is_none()));
    }

    #[test]
    fn each_lack_is_named_with_its_fix() {
        let lacks: [(&str, Machine, Outcome); 7] = [
            ("kernel", Machine { release: "5.4.0".into(), ..good() }, Outcome::Bad),
            ("uprobes", Machine { uprobes: false, ..good() }, Outcome::Bad),
            ("btf", Machine { btf: false, ..good() }, Outcome::Degraded),
            ("bpf rights", Machine { capabilities: 1 << CAP_SYS_PTRACE, ..good() }, Outcome::Bad),
            ("control rights", Machine { ptrace_scope: Some(3), ..good() }, Outcome::Degraded),
            ("pid namespace", Machine { initial_pid_namespace: false, ..good() }, Outcome::Bad),
            ("lockdown", Machine { lockdown: Some("confidentiality".into()), ..good() }, Outcome::Bad),
        ];
        for (name, machine, expected) in lacks {
            assert_eq!(outcome(&machine, name), expected, "{name}");
            assert!(judge(&machine).iter().any(|check| check.name == name && check.fix.is_some()), "{name}");
        }
    }

    #[test]
    fn bpf_and_perfmon_stand_for_sys_admin() {
        let machine = Machine { capabilities: 1 << CAP_BPF | 1 << CAP_PERFMON, ..good() };
        assert_eq!(outcome(&machine, "bpf rights"), Outcome::Good);
    }

    #[test]
    fn an_unreadable_release_counts_as_too_old() {
        assert_eq!(version("rolling"), (0, 0));
        assert_eq!(version("6.18.44-fc-v669"), (6, 18));
    }

    #[test]
    fn capabilities_are_read_from_status() {
        assert_eq!(capabilities("Name:\tx\nCapEff:\t000001fffeffffff\n"), 0x1ff_feff_ffff);
        assert_eq!(capabilities(""), 0);
    }
}
