//! Commands and messages of those who do not keep to the rules.

use proptest::prelude::*;

use super::*;
use crate::device::management::MAD_BYTES;
use crate::doors::rdma_cm::mad::CmMessage;

#[test]
fn commands_that_are_no_commands_are_refused() {
    let host = Host::on(&fabric());
    let write = |cmd: u32, bytes: u16, out: u16, body: usize| {
        let header = CmHeader {
            cmd,
            r#in: bytes,
            out,
        };
        host.write(&[header.to_bytes(), vec![0; body]].concat())
    };
    assert_eq!(host.write(&[0; 7]), Err(libc::EINVAL));
    assert_eq!(write(23, 0, 0, 0), Err(libc::EINVAL));
    assert_eq!(write(CREATE_ID, 24, 4, 23), Err(libc::EINVAL));
    assert_eq!(write(CREATE_ID, 24, 3, 24), Err(libc::ENOSPC));
    assert_eq!(write(13, 0, 0, 0), Err(libc::ENOSYS));
    assert_eq!(write(GET_EVENT, 8, 323, 8), Err(libc::ENOSPC));
    assert_eq!(write(GET_EVENT, 8, 324, 8), Err(libc::EAGAIN));
    // An answer that cannot be written: the identifier is not there afterwards.
    let request = CmCreateId {
        response: 8,
        ps: TCP,
        ..CmCreateId::default()
    };
    assert_eq!(host.command(CREATE_ID, request, 4), Err(libc::EFAULT));
    assert_eq!(host.create(TCP), 0);
    let unreadable = host.manager.write(host.opened.inode, &host, 8, 24);
    assert_eq!(unreadable, Err(libc::EFAULT));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_commands_are_answered(
        commands in proptest::collection::vec((0_u32..24, proptest::collection::vec(0_u8..8, 300)), 1..40)
    ) {
        let host = Host::on(&fabric());
        host.listen(TCP, 0x0101, 3);
        for (cmd, mut body) in commands {
            // Addresses of answers that cannot be written are refused; that is not what this is about.
            let mut answer = [0_u8; 1024];
            let at = answer.as_mut_ptr().expose_provenance() as u64;
            if cmd != LISTEN && cmd != 20 && cmd != 21 {
                body[..8].copy_from_slice(&at.to_ne_bytes());
            }
            let header = CmHeader { cmd, r#in: body.len() as u16, out: 1024 };
            let _ = host.write(&[header.to_bytes(), body].concat());
        }
    }

    #[test]
    fn any_messages_are_answered(
        mads in proptest::collection::vec((0x10_u8..0x19, proptest::collection::vec(0_u8..4, MAD_BYTES)), 1..60)
    ) {
        let host = Host::on(&fabric());
        host.listen(TCP, 0x0101, 3);
        host.listen(UDP, 0x0101, 3);
        let peer = host.device.mad_port();
        for (attribute, bytes) in mads {
            let mut mad: [u8; MAD_BYTES] = bytes.try_into().unwrap();
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..18].copy_from_slice(&[0, attribute]);
            // A service that is there.
            let service = if attribute == 0x17 { 0x0111_0101_u64 } else { 0x0106_0101 };
            mad[32..40].copy_from_slice(&service.to_be_bytes());
            let (transaction, message) = CmMessage::parse(&mad).unwrap();
            host.manager.shared.lock().on_message(peer, transaction, &message);
        }
        while host.try_event().is_ok() {}
        host.manager.close(host.opened.inode);
        prop_assert!(host.manager.shared.lock().ids.values().all(|id| id.file.is_none()));
    }
}
