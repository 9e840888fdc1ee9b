//! The seccomp filter of the reference door: which system calls of a client stop for the supervisor.
//!
//! A filter sees numbers and no memory, so it cannot distinguish paths: opens, and calls that look at a file's
//! attributes, permissions or link target, all stop, and the supervisor lets nearly all of them go on at once (some microseconds each).
//! Commands of the connection manager are writes. Their lengths are known, so writes of these lengths stop, too.
//! Nothing else does: reads, other writes, mappings, and every ioctl but the one of verbs run at full speed.

use std::mem::offset_of;

use libc::{c_long, seccomp_data, sock_filter};

use super::rdma_cm::COMMAND_BYTES;

/// `RDMA_VERBS_IOCTL`: `_IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)`.
pub(crate) const RDMA_VERBS_IOCTL: u32 = 0xc018_1b01;
const NETLINK_RDMA: u32 = 20;

/// `AUDIT_ARCH_*` of this machine: 64-bit programs only, others pass the filter untouched.
#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xc000_00b7;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const ASK: sock_filter = statement(RETURN, libc::SECCOMP_RET_USER_NOTIF);
const PASS: sock_filter = statement(RETURN, libc::SECCOMP_RET_ALLOW);

const fn statement(code: u16, k: u32) -> sock_filter {
    sock_filter {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

/// Skips `yes` or `no` instructions.
const fn branch(code: u16, k: u32, yes: u8, no: u8) -> sock_filter {
    sock_filter {
        code,
        jt: yes,
        jf: no,
        k,
    }
}

/// Loads the low half of an argument.
const fn argument(index: usize) -> sock_filter {
    let low_half = if cfg!(target_endian = "big") { 4 } else { 0 };
    let offset = offset_of!(seccomp_data, args) + 8 * index + low_half;
    statement(LOAD, offset as u32)
}

/// Calls that take a path and no folder. Newer architectures have none.
#[cfg(target_arch = "x86_64")]
const WITHOUT_FOLDER: &[c_long] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
];
#[cfg(not(target_arch = "x86_64"))]
const WITHOUT_FOLDER: &[c_long] = &[];

/// System calls with what is done about each.
fn rules() -> Vec<(c_long, Vec<sock_filter>)> {
    let ioctl = vec![
        argument(1),
        branch(EQUAL, RDMA_VERBS_IOCTL, 0, 1),
        ASK,
        PASS,
    ];
    // libibverbs asks the kernel by netlink which devices there are, and turns to sysfs where it cannot.
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPROTONOSUPPORT as u32;
    let socket = vec![
        argument(0),
        branch(EQUAL, libc::AF_NETLINK as u32, 0, 3),
        argument(2),
        branch(EQUAL, NETLINK_RDMA, 0, 1),
        statement(RETURN, refused),
        PASS,
    ];
    let mut write = vec![argument(2)];
    for (at, &bytes) in COMMAND_BYTES.iter().enumerate() {
        let to_ask = COMMAND_BYTES.len() - at;
        write.push(branch(EQUAL, bytes, to_ask as u8, 0));
    }
    write.extend([PASS, ASK]);
    let mut rules = vec![
        (libc::SYS_ioctl, ioctl),
        (libc::SYS_write, write),
        (libc::SYS_openat, vec![ASK]),
        (libc::SYS_openat2, vec![ASK]),
        (libc::SYS_newfstatat, vec![ASK]),
        (libc::SYS_fstat, vec![ASK]),
        (libc::SYS_statx, vec![ASK]),
        (libc::SYS_faccessat, vec![ASK]),
        (libc::SYS_faccessat2, vec![ASK]),
        (libc::SYS_readlinkat, vec![ASK]),
        (libc::SYS_getxattr, vec![ASK]),
        (libc::SYS_lgetxattr, vec![ASK]),
        (libc::SYS_listxattr, vec![ASK]),
        (libc::SYS_llistxattr, vec![ASK]),
        (libc::SYS_socket, socket),
    ];
    rules.extend(WITHOUT_FOLDER.iter().map(|&call| (call, vec![ASK])));
    rules
}

/// The program, as `seccomp(SECCOMP_SET_MODE_FILTER)` takes it.
pub(super) fn program() -> Vec<sock_filter> {
    let mut program = vec![
        statement(LOAD, offset_of!(seccomp_data, arch) as u32),
        branch(EQUAL, ARCH, 1, 0),
        PASS,
        statement(LOAD, offset_of!(seccomp_data, nr) as u32),
    ];
    for (call, rule) in rules() {
        // Every rule ends in a return on all of its ways, so behind a rule that was skipped the number is still loaded.
        program.push(branch(EQUAL, call as u32, 0, rule.len() as u8));
        program.extend(rule);
    }
    program.push(PASS);
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel's interpreter would say.
    fn verdict(call: c_long, args: [u64; 6]) -> u32 {
        verdict_on(ARCH, call, args)
    }

    fn verdict_on(arch: u32, call: c_long, args: [u64; 6]) -> u32 {
        let mut data = vec![0; size_of::<seccomp_data>()];
        data[..4].copy_from_slice(&(call as u32).to_ne_bytes());
        data[4..8].copy_from_slice(&arch.to_ne_bytes());
        for (at, arg) in args.iter().enumerate() {
            data[16 + 8 * at..][..8].copy_from_slice(&arg.to_ne_bytes());
        }
        let program = program();
        let (mut at, mut a) = (0, 0);
        loop {
            let step = program[at];
            let yes = match step.code {
                LOAD => {
                    a = u32::from_ne_bytes(data[step.k as usize..][..4].try_into().unwrap());
                    false
                }
                EQUAL => a == step.k,
                RETURN => return step.k,
                other => panic!("{other}"),
            };
            at += 1 + usize::from(if yes { step.jt } else { step.jf });
        }
    }

    const ASK: u32 = libc::SECCOMP_RET_USER_NOTIF;
    const PASS: u32 = libc::SECCOMP_RET_ALLOW;

    #[test]
    fn device_calls_are_trapped_and_others_run() {
        let ioctl = |request| verdict(libc::SYS_ioctl, [3, request, 0, 0, 0, 0]);
        assert_eq!(ioctl(0xc018_1b01), ASK);
        assert_eq!(ioctl(0xffff_ffff_c018_1b01), ASK);
        assert_eq!(ioctl(0x5401), PASS);
        let socket = |family, protocol| verdict(libc::SYS_socket, [family, 3, protocol, 0, 0, 0]);
        let refused = libc::SECCOMP_RET_ERRNO | libc::EPROTONOSUPPORT as u32;
        assert_eq!(socket(16, 20), refused);
        assert_eq!(socket(16, 0), PASS);
        assert_eq!(socket(2, 20), PASS);
        for call in [
            libc::SYS_newfstatat,
            libc::SYS_fstat,
            libc::SYS_statx,
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_faccessat,
            libc::SYS_faccessat2,
            libc::SYS_readlinkat,
            libc::SYS_lgetxattr,
        ] {
            assert_eq!(verdict(call, [0; 6]), ASK);
        }
        let write = |bytes| verdict(libc::SYS_write, [3, 0x1000, bytes, 0, 0, 0]);
        for bytes in COMMAND_BYTES {
            assert_eq!(write(bytes.into()), ASK, "{bytes}");
        }
        for bytes in [0, 1, 8, 13, 31, 64, 4096] {
            assert_eq!(write(bytes), PASS, "{bytes}");
        }
        for call in [
            libc::SYS_read,
            libc::SYS_mmap,
            libc::SYS_close,
            libc::SYS_execve,
        ] {
            assert_eq!(verdict(call, [0; 6]), PASS);
        }
    }

    #[test]
    fn programs_of_another_architecture_pass() {
        assert_eq!(
            verdict_on(0x4000_0003, libc::SYS_ioctl, [3, 0xc018_1b01, 0, 0, 0, 0]),
            PASS
        );
    }
}
