//! The reader of CQEs, and the writer that the software NIC has: what one keeps, the other gives back.
#![no_main]

use doorbell_wire::mlx5::Cqe;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some(bytes) = data.first_chunk::<64>() else {
        return;
    };
    let cqe = Cqe::parse(bytes);
    assert!(!cqe.status().to_string().is_empty());
    for owner in [false, true] {
        let written = cqe.encode(owner);
        let again = Cqe::parse(&written);
        assert_eq!(again.owner, owner);
        assert_eq!(
            (
                again.opcode,
                again.qpn,
                again.wqe_counter,
                again.send_opcode
            ),
            (cqe.opcode, cqe.qpn, cqe.wqe_counter, cqe.send_opcode)
        );
        assert_eq!(
            (again.syndrome, again.vendor_syndrome, again.status()),
            (cqe.syndrome, cqe.vendor_syndrome, cqe.status())
        );
        assert_eq!(
            again.encode(owner),
            written,
            "written, read and written again differs"
        );
    }
});
