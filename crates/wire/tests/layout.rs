//! C, C++, CUDA and Rust agree on the layouts.

#[path = "../../../tests/waived/mod.rs"]
mod waived;

use std::collections::BTreeMap;
use std::mem::{align_of, offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use doorbell_wire::bytecode::{BLOCK_BYTES_MAX, Fence, Kind, Role, UNIT_LIMIT, Unit};
use doorbell_wire::mlx5::{DataSegment, Opcode, layout};
use waived::waived;

#[test]
fn rust_layout_matches_c() {
    let mut rust: BTreeMap<&str, u64> = [
        ("dbl_unit", size_of::<Unit>()),
        ("dbl_unit.kind", offset_of!(Unit, kind)),
        ("dbl_unit.role", offset_of!(Unit, role)),
        ("dbl_unit.len_bytes", offset_of!(Unit, len_bytes)),
        ("dbl_unit.target", offset_of!(Unit, target)),
        ("dbl_unit.offset", offset_of!(Unit, offset)),
        ("dbl_unit.value", offset_of!(Unit, value)),
        ("unit:LIMIT", UNIT_LIMIT),
        ("unit:BLOCK_BYTES_MAX", BLOCK_BYTES_MAX as usize),
        ("kind:STORE_DWORD", Kind::StoreDword as usize),
        ("kind:STORE_QWORD", Kind::StoreQword as usize),
        ("kind:COPY_BLOCK", Kind::CopyBlock as usize),
        ("kind:POLL_GEQ", Kind::PollGeq as usize),
        ("kind:POLL_AND", Kind::PollAnd as usize),
        ("kind:POLL_NOR", Kind::PollNor as usize),
        ("kind:FENCE", Kind::Fence as usize),
        ("role:DOORBELL_RECORD", Role::DoorbellRecord as usize),
        ("role:UAR", Role::Uar as usize),
        ("role:COMPLETIONS", Role::Completions as usize),
        ("role:MARKS", Role::Marks as usize),
        ("role:MEMORY", Role::Memory as usize),
        ("fence:READ", Fence::READ.bits() as usize),
        ("fence:WRITE", Fence::WRITE.bits() as usize),
        ("fence:FROM_CPU", Fence::FROM_CPU.bits() as usize),
        ("fence:FROM_HCA", Fence::FROM_HCA.bits() as usize),
        ("fence:SYSTEM", Fence::SYSTEM.bits() as usize),
        ("fence:PEER", Fence::PEER.bits() as usize),
        ("dbl_sge", size_of::<DataSegment>()),
        ("dbl_sge.len_bytes", offset_of!(DataSegment, len_bytes)),
        ("dbl_sge.lkey", offset_of!(DataSegment, lkey)),
        ("dbl_sge.addr", offset_of!(DataSegment, addr)),
        ("opcode:NOP", Opcode::Nop as usize),
        ("opcode:SEND_INVAL", Opcode::SendInval as usize),
        ("opcode:RDMA_WRITE", Opcode::RdmaWrite as usize),
        ("opcode:RDMA_WRITE_IMM", Opcode::RdmaWriteImm as usize),
        ("opcode:SEND", Opcode::Send as usize),
        ("opcode:SEND_IMM", Opcode::SendImm as usize),
        ("opcode:RDMA_READ", Opcode::RdmaRead as usize),
        ("opcode:ATOMIC_CS", Opcode::AtomicCs as usize),
        ("opcode:ATOMIC_FA", Opcode::AtomicFa as usize),
    ]
    .map(|(name, value)| (name, value as u64))
    .into();
    assert_eq!(align_of::<Unit>(), 8);
    // Both ways: nothing that C exports is forgotten here, and the other way round. `dbl_wr` is private: src/mlx5/shim.rs has it.
    for (name, value) in layout()
        .into_iter()
        .filter(|(name, _)| !name.starts_with("dbl_wr"))
    {
        assert_eq!(rust.remove(name), Some(value), "{name}");
    }
    assert_eq!(rust, BTreeMap::new(), "in Rust only");
}

/// What a program would do with the headers, in the common part of the three languages.
const USER: &str = r#"
#include <doorbell/detail/wqe.h>
#include <stdio.h>

static int same(const uint8_t *bytes, const char *hex, unsigned length)
{
	unsigned i;
	for (i = 0; i < length; i++) {
		unsigned value;
		if (sscanf(hex + 2 * i, "%2x", &value) != 1 || bytes[i] != value)
			return 0;
	}
	return 1;
}

int main(void)
{
	static uint64_t ring[8 * 4];
	uint8_t *bytes = (uint8_t *)ring;
	struct dbl_sge sge;
	struct dbl_wr wr;
	uint64_t doorbell;
	memset(&wr, 0, sizeof(wr));
	sge.len_bytes = 0x40;
	sge.lkey = 0x01020304;
	sge.addr = 0x1122334455667788;
	wr.remote_addr = 0x0123456789abcdef;
	wr.rkey = 0xcafef00d;
	wr.qpn = 0x123456;
	wr.payload = &sge;
	wr.count = 1;
	wr.opcode = DBL_OPCODE_RDMA_WRITE;
	wr.flags = DBL_WR_SIGNALED;
	/* Count 7 of 4: the last WQEBB. */
	if (dbl_wqe_emit(bytes, 3, 7, &wr, &doorbell) != 1 || doorbell != ring[24] ||
	    !same(bytes + 192, "00000708123456030000000800000000", 16) ||
	    !same(bytes + 208, "0123456789abcdefcafef00d00000000000000400102030411223344556677880000", 34))
		return 1;
	/* 100 bytes inline from count 7 on: two WQEBBs, the second one at the start of the ring. */
	wr.opcode = DBL_OPCODE_SEND_IMM;
	wr.imm = 0xaabbccdd;
	wr.is_inline = 1;
	wr.payload = "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789";
	wr.count = 100;
	if (dbl_wqe_emit(bytes, 3, 7, &wr, &doorbell) != 2 ||
	    !same(bytes + 192, "0000070b1234560800000008aabbccdd80000064303132333435363738393031", 32) ||
	    !same(bytes, "343536373839", 6))
		return 2;
	doorbell = dbl_wqe_overwrite_with_nop(bytes, 3, 7, 0x123456, 2, 0);
	if (doorbell != ring[24] || !same(bytes + 192, "00000700123456080000000000000000", 16))
		return 3;
	/* The bytes 32 to 47 are still those of the inline data. */
	doorbell = dbl_wqe_read_over_nop(bytes, 3, 7, 0x123456, 0x0123456789abcdef, 0xcafef00d, 0x40);
	if (doorbell != ring[24] ||
	    !same(bytes + 192, "00000710123456030000000800000000" "0123456789abcdefcafef00d00000000" "00000040", 36))
		return 6;
	dbl_recv_wqe_emit(bytes, 1, 6, 3, &sge, 1);
	if (!same(bytes + 64, "0000004001020304112233445566778800000000000001000000000000000000", 32))
		return 4;
	if (dbl_poll_satisfied(DBL_POLL_GEQ, 1, 2) || !dbl_poll_satisfied(DBL_POLL_GEQ, 2, 0xfffffffe) ||
	    dbl_poll_satisfied(DBL_POLL_AND, 1, 2) || dbl_poll_satisfied(DBL_POLL_NOR, 1, 0xfffffffe) ||
	    !dbl_poll_satisfied(DBL_POLL_NOR, 0, 0xfffffffe))
		return 5;
	return 0;
}
"#;

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

fn headers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Compiles the user with that compiler and runs it; or says why the test is waived.
fn compile_and_run(test: &str, compiler: &str, extension: &str, arguments: &[&str]) {
    if Command::new(compiler).arg("--version").output().is_err() {
        return waived(test, &format!("{compiler} is not installed"));
    }
    let source = directory().join(format!("{test}.{extension}"));
    let program = directory().join(test);
    std::fs::write(&source, USER).unwrap();
    let output = Command::new(compiler)
        .args(arguments)
        .arg("-I")
        .arg(headers())
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{compiler}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let status = Command::new(&program).status().unwrap();
    assert_eq!(status.code(), Some(0), "the check of that number failed");
}

const STRICT: [&str; 6] = [
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wconversion",
    "-Werror",
    "-O2",
];

#[test]
fn headers_in_c11() {
    compile_and_run(
        "headers_in_c11",
        "cc",
        "c",
        &[&STRICT[..], &["-std=c11"]].concat(),
    );
}

#[test]
fn headers_in_cxx17() {
    compile_and_run(
        "headers_in_cxx17",
        "g++",
        "cc",
        &[&STRICT[..], &["-std=c++17"]].concat(),
    );
}

/// CUDA's rules as far as they can be had without its compiler: the qualifiers expand to something, and the compiler is C++.
#[test]
fn headers_with_the_qualifiers_of_cuda() {
    let qualifiers = [
        "-std=c++17",
        "-D__CUDACC__",
        "-D__host__=",
        "-D__device__=__attribute__((unused))",
    ];
    let arguments = [&STRICT[..], &qualifiers].concat();
    compile_and_run(
        "headers_with_the_qualifiers_of_cuda",
        "g++",
        "cc",
        &arguments,
    );
}

/// Kernels that call every function of the headers; they are compiled for the device, and a GPU to run them is not needed.
const KERNELS: &str = r#"
#include <doorbell/detail/wqe.h>
#include <doorbell/detail/bytecode.h>
extern "C" __global__ void emit(uint8_t *ring, uint32_t mask, uint32_t index, const struct dbl_wr *wr, uint64_t *doorbell)
{
	*doorbell = dbl_wqe_emit(ring, mask, index, wr, doorbell);
}
extern "C" __global__ void emit_nop(uint8_t *ring, uint32_t mask, uint32_t index, uint32_t qpn, uint64_t *doorbell)
{
	*doorbell = dbl_wqe_overwrite_with_nop(ring, mask, index, qpn, 1, 1);
}
extern "C" __global__ void emit_read(uint8_t *ring, uint32_t mask, uint32_t index, uint32_t qpn, uint64_t *doorbell)
{
	*doorbell = dbl_wqe_read_over_nop(ring, mask, index, qpn, 1, 2, 3);
}
extern "C" __global__ void emit_recv(uint8_t *ring, uint32_t mask, uint32_t index, const struct dbl_sge *sges)
{
	dbl_recv_wqe_emit(ring, mask, 6, index, sges, 4);
}
extern "C" __global__ void poll(const uint32_t *word, int *satisfied)
{
	*satisfied = dbl_poll_satisfied(DBL_POLL_GEQ, *word, 1);
}
"#;

/// What an application's kernels do with `device.cuh`, and a file that uses none of it.
const DEVICE: &str = r#"
#include <doorbell/device.cuh>
#include <doorbell/device.cuh>
#ifndef UNUSED
extern "C" __global__ void thread(const __grid_constant__ doorbell_trigger trigger, int *code)
{
	*code = doorbell_device_trigger(&trigger, 1000000);
}
extern "C" __global__ void warp(const __grid_constant__ doorbell_trigger trigger, int *codes)
{
	codes[threadIdx.x] = doorbell_device_trigger_warp(&trigger, 0xffffffff, 1000000);
}
extern "C" __global__ void block(const __grid_constant__ doorbell_trigger trigger, int *codes)
{
	codes[threadIdx.x] = doorbell_device_trigger_block(&trigger, 1000000);
}
extern "C" __global__ void values(uint32_t *word, uint64_t *wide, const int32_t *status, int *code)
{
	doorbell_device_write_value32(word, 1);
	doorbell_device_write_value64(wide, doorbell_device_signal_fetch(wide + 1));
	*code = doorbell_device_signal_wait_until(wide, DOORBELL_CMP_LT, 2, 1000000, status);
	*code = doorbell_device_wait_value32(word + 1, DOORBELL_WAIT_GEQ, 2, 1000000, status);
}
extern "C" __global__ void posts(const __grid_constant__ doorbell_queue_view queue, doorbell_local local, doorbell_remote remote, int *codes)
{
	uint32_t upto, slot;

	codes[0] = doorbell_device_put(&queue, local, remote, 1000, &upto);
	codes[1] = doorbell_device_get(&queue, local, remote, 1000, &upto);
	codes[2] = doorbell_device_fetch_add(&queue, local, remote, 1, 1000, &upto);
	codes[3] = doorbell_device_put_imm(&queue, local, remote, 7, 1000, &upto);
	codes[4] = doorbell_device_signal(&queue, remote, DOORBELL_SIGNAL_ADD, 1, 1000, &upto);
	codes[5] = doorbell_device_wait(&queue, upto, 1000000);
	codes[6] = doorbell_device_poll(&queue);
	codes[7] = (int)doorbell_device_error(&queue);
	if (doorbell_device_reserve(&queue, 2, 1000, &slot) != DOORBELL_OK)
		return;
	codes[8] = doorbell_device_write_inline(&queue, slot, DOORBELL_WORK_UNSIGNALED, &slot, 4, remote);
	doorbell_device_write_nop(&queue, slot + 1, 0);
	codes[9] = doorbell_device_submit(&queue, slot, 2);
	codes[10] = doorbell_device_put_signal(&queue, local, remote, remote, DOORBELL_SIGNAL_SET, 1, 1000, &upto);
	codes[11] = doorbell_device_quiet(&queue, 1000000) | doorbell_device_flush(&queue, 0);
}
extern "C" __global__ void posts_alone(const __grid_constant__ doorbell_queue_view queue, doorbell_local local, doorbell_remote remote, int *code)
{
	const doorbell_queue_view own = doorbell_device_exclusive(&queue);

	*code = doorbell_device_put(&own, local, remote, 1000, nullptr);
}
/* Each call of a warp and of a block: templates are compiled where they are used. */
extern "C" __global__ void posts_together(const __grid_constant__ doorbell_queue_view queue, doorbell_local local, doorbell_remote remote,
					  uint64_t *word, uint32_t *half, int *codes)
{
	const uint32_t lanes = __activemask();
	uint32_t upto;

	codes[0] = doorbell_device_put_lanes(&queue, lanes, doorbell_device_local_at(local, 8 * threadIdx.x, 8),
					     doorbell_device_remote_at(remote, 8 * threadIdx.x, 8), 1000, &upto);
	codes[1] = doorbell_device_put_warp(&queue, lanes, local, remote, 1000, &upto);
	codes[2] = doorbell_device_put_imm_warp(&queue, lanes, local, remote, 1, 1000, &upto);
	codes[3] = doorbell_device_get_warp(&queue, lanes, local, remote, 1000, &upto);
	codes[4] = doorbell_device_fetch_add_warp(&queue, lanes, local, remote, 1, 1000, &upto);
	codes[5] = doorbell_device_signal_warp(&queue, lanes, remote, DOORBELL_SIGNAL_ADD, 1, 1000, &upto);
	codes[6] = doorbell_device_put_signal_warp(&queue, lanes, local, remote, remote, DOORBELL_SIGNAL_SET, 1, 1000, &upto);
	codes[7] = doorbell_device_wait_warp(&queue, lanes, upto, 1000);
	codes[8] = doorbell_device_quiet_warp(&queue, lanes, 1000) | doorbell_device_flush_warp(&queue, lanes, 1000);
	codes[9] = doorbell_device_signal_wait_until_warp(lanes, word, DOORBELL_CMP_GE, 1, 1000, nullptr);
	codes[10] = doorbell_device_wait_value32_warp(lanes, half, DOORBELL_WAIT_GEQ, 1, 1000, nullptr);
	codes[21] = doorbell_device_put_inline_warp(&queue, lanes, &upto, 4, remote, 1000, nullptr);
	codes[22] = doorbell_device_put_inline_block(&queue, &upto, 4, remote, 1000, nullptr);
	codes[11] = doorbell_device_put_block(&queue, local, remote, 1000, &upto);
	codes[12] = doorbell_device_put_imm_block(&queue, local, remote, 1, 1000, &upto);
	codes[13] = doorbell_device_get_block(&queue, local, remote, 1000, &upto);
	codes[14] = doorbell_device_fetch_add_block(&queue, local, remote, 1, 1000, &upto);
	codes[15] = doorbell_device_signal_block(&queue, remote, DOORBELL_SIGNAL_ADD, 1, 1000, &upto);
	codes[16] = doorbell_device_put_signal_block(&queue, local, remote, remote, DOORBELL_SIGNAL_SET, 1, 1000, &upto);
	codes[17] = doorbell_device_wait_block(&queue, upto, 1000000);
	codes[18] = doorbell_device_quiet_block(&queue, 1000) | doorbell_device_flush_block(&queue, 1000);
	codes[19] = doorbell_device_signal_wait_until_block(word, DOORBELL_CMP_GE, 1, 1000, nullptr);
	codes[20] = doorbell_device_wait_value32_block(half, DOORBELL_WAIT_GEQ, 1, 1000, nullptr);
}
#endif
"#;

/// The machine's code, and not PTX alone: what `ptxas` cannot make of the assembly is found here, for each architecture.
#[test]
fn device_header_in_cuda() {
    let test = "headers_in_cuda, device.cuh";
    let Some(nvcc) = nvcc() else {
        return waived(test, "nvcc is not installed");
    };
    let source = directory().join("device_header.cu");
    std::fs::write(&source, DEVICE).unwrap();
    for (architecture, options) in [
        ("sm_75", &[][..]),
        ("sm_80", &[]),
        ("sm_86", &[]),
        ("sm_89", &[]),
        ("sm_90", &[]),
        ("sm_75", &["-DUNUSED"]),
    ] {
        let cubin = directory().join("device_header.cubin");
        let output = Command::new(&nvcc)
            .args(["-std=c++17", "-Werror", "all-warnings", "-cubin"])
            .args(["-Xptxas", "-Werror", "-arch", architecture])
            .args(options)
            .arg("-I")
            .arg(headers())
            .arg(&source)
            .arg("-o")
            .arg(&cubin)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{architecture}: {said}");
        let code = std::fs::read(&cubin).unwrap();
        for kernel in [
            "thread",
            "warp",
            "block",
            "values",
            "posts",
            "posts_alone",
            "posts_together",
        ] {
            let section = format!(".text.{kernel}\0");
            let is_there = code
                .windows(section.len())
                .any(|bytes| bytes == section.as_bytes());
            assert_eq!(is_there, options.is_empty(), "{architecture}: {kernel}");
        }
    }
}

/// The variable that build.rs reads; `scripts/setup-cuda` brings one.
fn nvcc() -> Option<String> {
    let nvcc = std::env::var("DOORBELL_NVCC").unwrap_or_else(|_| "nvcc".into());
    let is_there = Command::new(&nvcc).arg("--version").output().is_ok();
    is_there.then_some(nvcc)
}

#[test]
fn headers_in_cuda() {
    let test = "headers_in_cuda";
    let Some(nvcc) = nvcc() else {
        return waived(test, "nvcc is not installed");
    };
    let source = directory().join("headers_in_cuda.cu");
    let ptx = directory().join("headers_in_cuda.ptx");
    std::fs::write(&source, KERNELS).unwrap();
    let output = Command::new(&nvcc)
        .args(["-std=c++17", "-Werror", "all-warnings", "-ptx", "-I"])
        .arg(headers())
        .arg(&source)
        .arg("-o")
        .arg(&ptx)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "nvcc: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let ptx = std::fs::read_to_string(&ptx).unwrap();
    for kernel in ["emit", "emit_nop", "emit_recv", "poll"] {
        assert!(ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
    }
    // The byte order is swapped by one instruction a word.
    assert!(
        ptx.contains("prmt.b32"),
        "no byte permutation in the device code"
    );
}
