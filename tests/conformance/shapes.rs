//! Every operation in every shape.

use doorbell::{
    Access, Device, EndpointConfig, QueueKind, Region, RemoteSlice, Slice, Status, Work,
};

use crate::rig::{Limit, Pair, Random, from_env, has_atomics};
use crate::{Driver, Rig, STEP, rigs};

const SIZES: [u64; 18] = [
    0,
    1,
    7,
    8,
    63,
    64,
    65,
    160,
    200,
    255,
    256,
    1023,
    4095,
    4096,
    4097,
    (16 << 10) + 3,
    64 << 10,
    1 << 20,
];
const MAX_INLINE: u64 = 256;
/// Untouched bytes before, between and behind what is transferred.
const GUARD: u64 = 24;
const REGION: u64 = (1 << 20) + 8 * GUARD;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Send,
    SendImm,
    SendInline,
    SendInlineImm,
    Write,
    WriteImm,
    WriteInline,
    WriteInlineImm,
    Read,
    CompareSwap,
    FetchAdd,
    Nop,
}

const OPS: [Op; 12] = [
    Op::Send,
    Op::SendImm,
    Op::SendInline,
    Op::SendInlineImm,
    Op::Write,
    Op::WriteImm,
    Op::WriteInline,
    Op::WriteInlineImm,
    Op::Read,
    Op::CompareSwap,
    Op::FetchAdd,
    Op::Nop,
];

impl Op {
    fn is_inline(self) -> bool {
        use Op::{SendInline, SendInlineImm, WriteInline, WriteInlineImm};
        matches!(
            self,
            SendInline | SendInlineImm | WriteInline | WriteInlineImm
        )
    }

    fn is_send(self) -> bool {
        use Op::{Send, SendImm, SendInline, SendInlineImm};
        matches!(self, Send | SendImm | SendInline | SendInlineImm)
    }

    fn has_imm(self) -> bool {
        use Op::{SendImm, SendInlineImm, WriteImm, WriteInlineImm};
        matches!(self, SendImm | SendInlineImm | WriteImm | WriteInlineImm)
    }

    fn takes_receive(self) -> bool {
        self.is_send() || self.has_imm()
    }

    fn allows(self, len: u64, slices: usize) -> bool {
        match self {
            Op::CompareSwap | Op::FetchAdd => len == 8 && slices == 1,
            Op::Nop => len == 0 && slices == 1,
            _ if self.is_inline() => len <= MAX_INLINE,
            _ => true,
        }
    }
}

/// A region and what it must hold, byte by byte.
struct Image {
    region: Region,
    bytes: Vec<u8>,
    /// How many bytes the current case checks.
    used: usize,
}

impl Image {
    fn new(pair: &Pair) -> Image {
        Image {
            region: pair.region(REGION),
            bytes: vec![0; REGION as usize],
            used: 0,
        }
    }

    fn begin(&mut self, used: u64, random: &mut Random) {
        self.used = used as usize;
        let mut word = random.next();
        for chunk in self.bytes[..self.used].chunks_mut(8) {
            word = word.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ 0x5bd1;
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        }
        self.region.write(0, &self.bytes[..self.used]).unwrap();
    }

    fn check(&self, scratch: &mut Vec<u8>) {
        scratch.resize(self.used, 0);
        self.region.read(0, scratch).unwrap();
        let expected = &self.bytes[..self.used];
        // Compared as a whole first: byte by byte took half of the suite's time.
        if scratch[..] != *expected {
            let mut pairs = scratch.iter().zip(expected);
            let wrong = pairs.position(|(got, expected)| got != expected);
            panic!("byte {wrong:?} is wrong");
        }
    }

    fn take(&self, pieces: &[(u64, u64)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (offset, len) in pieces {
            bytes.extend_from_slice(&self.bytes[*offset as usize..][..*len as usize]);
        }
        bytes
    }

    fn put(&mut self, pieces: &[(u64, u64)], mut bytes: &[u8]) {
        for (offset, len) in pieces {
            let (now, later) = bytes.split_at((*len as usize).min(bytes.len()));
            self.bytes[*offset as usize..][..now.len()].copy_from_slice(now);
            bytes = later;
        }
    }

    fn slices(&self, pieces: &[(u64, u64)]) -> Vec<Slice<'_>> {
        pieces
            .iter()
            .map(|(offset, len)| self.region.slice(*offset, *len).unwrap())
            .collect()
    }
}

/// `len` bytes in that many pieces of unequal length, with guard bytes around each; pieces may be empty.
fn pieces(len: u64, count: usize, first_is_long: bool) -> Vec<(u64, u64)> {
    let mut rest = len;
    let mut lens: Vec<u64> = (0..count - 1)
        .map(|_| {
            let piece = rest / 3;
            rest -= piece;
            piece
        })
        .collect();
    lens.push(rest);
    if first_is_long {
        lens.reverse();
    }
    let mut at = GUARD;
    let place = |len| {
        let offset = at;
        at += len + GUARD;
        (offset, len)
    };
    lens.into_iter().map(place).collect()
}

struct Bench<'a> {
    pair: Pair,
    driver: Box<dyn Driver + 'a>,
    here: Image,
    there: Image,
    random: Random,
    scratch: Vec<u8>,
    cases: u64,
}

impl Bench<'_> {
    fn new(rig: &Rig, device: &Device, blueflame: bool) -> Bench<'static> {
        // Small queues, so that everything wraps again and again.
        let config = EndpointConfig::default()
            .send_depth(5)
            .recv_depth(3)
            .max_segments(4)
            .max_inline_bytes(MAX_INLINE as u32)
            .blueflame(blueflame);
        let pair = Pair::new(device, &config);
        Bench {
            here: Image::new(&pair),
            there: Image::new(&pair),
            pair,
            driver: (rig.driver)(),
            random: Random(7),
            scratch: Vec::new(),
            cases: 0,
        }
    }

    fn case(&mut self, op: Op, len: u64, slices: usize, signaled: bool) {
        self.cases += 1;
        let span = len + (slices as u64 + 1) * GUARD;
        self.here.begin(span, &mut self.random);
        self.there.begin(span, &mut self.random);
        let imm = self.random.next() as u32;
        let near = pieces(len, slices, false);
        // The peer's side is split differently; remote memory of a write or read is one piece.
        let far = if op.is_send() {
            pieces(len, slices, true)
        } else {
            vec![(GUARD, len)]
        };
        let remote = self.there.region.remote();
        let addr = remote.slice(GUARD, len).unwrap();
        let data = self.here.take(&near);
        let operand = self.random.next();
        let old = self.there.take(&far);
        let old_word = u64::from_ne_bytes(*old.first_chunk().unwrap_or(&[0; 8]));
        // Every other comparison holds.
        let compare = old_word ^ (self.cases & 1);
        let wr_id = self.random.next();

        let receive = op.takes_receive().then(|| {
            let there = &self.there;
            let slices = if op.is_send() {
                there.slices(&far)
            } else {
                Vec::new()
            };
            self.driver.recv(&mut self.pair.b, 77, &slices)
        });
        let local = self.here.slices(&near);
        let work = match op {
            Op::Send | Op::SendImm => Work::send(&local),
            Op::SendInline | Op::SendInlineImm => Work::send_inline(&data),
            Op::Write | Op::WriteImm => Work::write(&local, addr),
            Op::WriteInline | Op::WriteInlineImm => Work::write_inline(&data, addr),
            Op::Read => Work::read(&local, addr),
            Op::CompareSwap => Work::compare_swap(&local, addr, compare, operand),
            Op::FetchAdd => Work::fetch_add(&local, addr, operand),
            Op::Nop => Work::nop(),
        };
        let work = if op.has_imm() { work.imm(imm) } else { work };
        let work = work.wr_id(wr_id).signaled(signaled);
        let a = &mut self.pair.a;
        let ticket = self.driver.send(a, &work);
        if !signaled {
            // An unsignaled request is known to be done when a later one is.
            self.driver.send(a, &Work::nop());
        }
        self.driver.wait(a, QueueKind::Send);
        if receive.is_some() {
            self.driver.wait(&mut self.pair.b, QueueKind::Recv);
        }
        self.driver.settle();

        assert_eq!(ticket.status(), Status::Complete);
        if let Some(receive) = receive {
            assert_eq!(receive.status(), Status::Complete);
            let expected = (len as u32, op.has_imm().then_some(imm));
            assert_eq!(receive.details(), Some(expected));
            let is_write = matches!(op, Op::WriteImm | Op::WriteInlineImm);
            assert_eq!(receive.transfer_details().unwrap().is_write, is_write);
        }
        match op {
            Op::Read => self.here.put(&near, &old),
            Op::CompareSwap | Op::FetchAdd => {
                self.here.put(&near, &old);
                let new = match op {
                    Op::FetchAdd => old_word.wrapping_add(operand),
                    _ if compare == old_word => operand,
                    _ => old_word,
                };
                self.there.put(&far, &new.to_ne_bytes());
            }
            _ => self.there.put(&far, &data),
        }
        self.here.check(&mut self.scratch);
        self.there.check(&mut self.scratch);
    }
}

#[test]
fn every_operation_moves_its_bytes_and_no_others() {
    let limit = Limit::new("shapes", STEP);
    // Shorter where a transfer takes long.
    let longest = from_env("DOORBELL_MESSAGE_MAX", u64::MAX);
    let sizes = || SIZES.into_iter().filter(|len| *len <= longest);
    for rig in rigs() {
        for blueflame in [false, true] {
            let device = (rig.open)();
            let atomics = has_atomics(&device, "every_operation_moves_its_bytes");
            let mut bench = Bench::new(&rig, &device, blueflame);
            let has = |op: &Op| atomics || !matches!(op, Op::CompareSwap | Op::FetchAdd);
            for op in OPS.into_iter().filter(has) {
                for len in sizes() {
                    for slices in 1..=4 {
                        for signaled in [true, false] {
                            if !op.allows(len, slices) {
                                continue;
                            }
                            // A case is a step, not all of them: how many there are in two minutes says how busy the machine is.
                            limit.step(bench.cases, STEP);
                            let context = (rig.name, blueflame, op, len, slices, signaled);
                            let run = || bench.case(op, len, slices, signaled);
                            if let Err(panic) =
                                std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
                            {
                                eprintln!("in {context:?}");
                                std::panic::resume_unwind(panic);
                            }
                        }
                    }
                }
            }
            // 5 operations of all (18) sizes and 4 inline ones of 11, each with 4 slicings; 2 atomics; a nop; all signaled or not.
            let count = sizes().count() as u64;
            let atomics = if atomics { 2 } else { 0 };
            assert_eq!(bench.cases, 2 * (5 * count * 4 + 4 * 11 * 4 + atomics + 1));
        }
    }
}

#[test]
fn operations_without_slices_move_nothing() {
    for rig in rigs() {
        let mut pair = Pair::new(&(rig.open)(), &EndpointConfig::default());
        let mut driver = (rig.driver)();
        let region = pair.region(64);
        let (addr, rkey) = (region.remote().addr, region.remote().rkey);
        for work in [
            Work::write(&[], RemoteSlice::at(addr, rkey)),
            Work::read(&[], RemoteSlice::at(addr, rkey)),
            // No memory is accessed, so no key is checked.
            Work::write(&[], RemoteSlice::at(0, 0)),
            Work::read(&[], RemoteSlice::at(0, 0)),
        ] {
            driver.send(&mut pair.a, &work);
            driver.wait(&mut pair.a, QueueKind::Send);
        }
        let receive = driver.recv(&mut pair.b, 0, &[]);
        driver.send(&mut pair.a, &Work::send(&[]).imm(5));
        driver.wait(&mut pair.a, QueueKind::Send);
        driver.wait(&mut pair.b, QueueKind::Recv);
        driver.settle();
        assert_eq!(receive.details(), Some((0, Some(5))), "{}", rig.name);
        assert!(region.is_filled_with(0, 64, 0).unwrap());
    }
}

/// A receive may be longer than its message: the rest of its memory stays unchanged. Each region has only the access rights that its operation needs.
#[test]
fn short_messages_and_minimal_access_rights_work() {
    for rig in rigs() {
        let device = (rig.open)();
        let atomics = has_atomics(&device, "short_messages_and_minimal_access_rights_work");
        let mut pair = Pair::new(&device, &EndpointConfig::default());
        let mut driver = (rig.driver)();
        let region = |access| Region::alloc(&pair.domain, 4096, access).unwrap();
        let (source, sink) = (region(Access::LOCAL_READ), region(Access::LOCAL_WRITE));
        let written = region(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let read = region(Access::REMOTE_READ);
        let counted = region(Access::LOCAL_WRITE | Access::REMOTE_ATOMIC);
        source.fill(0, 4096, 3).unwrap();
        read.fill(0, 4096, 4).unwrap();
        let receive = driver.recv(
            &mut pair.b,
            1,
            &[
                sink.slice(0, 100).unwrap(),
                sink.slice(200, 100).unwrap(),
                sink.slice(400, 100).unwrap(),
            ],
        );
        let message = [source.slice(0, 150).unwrap()];
        driver.send(&mut pair.a, &Work::send(&message));
        let target = written.remote();
        driver.send(
            &mut pair.a,
            &Work::write(&message, RemoteSlice::at(target.addr, target.rkey)),
        );
        let into = [sink.slice(1000, 50).unwrap()];
        driver.send(
            &mut pair.a,
            &Work::read(
                &into,
                RemoteSlice::at(read.remote().addr, read.remote().rkey),
            ),
        );
        let result = [sink.slice(2000, 8).unwrap()];
        let word = counted.remote();
        if atomics {
            let work = Work::fetch_add(&result, RemoteSlice::at(word.addr, word.rkey), 41);
            driver.send(&mut pair.a, &work);
            driver.wait(&mut pair.a, QueueKind::Send);
        }
        for _ in 0..3 {
            driver.wait(&mut pair.a, QueueKind::Send);
        }
        driver.wait(&mut pair.b, QueueKind::Recv);
        driver.settle();
        assert_eq!(receive.details(), Some((150, None)));
        for (offset, len, value) in [(0, 100, 3), (100, 100, 0), (200, 50, 3), (250, 750, 0)] {
            assert!(sink.is_filled_with(offset, len, value).unwrap());
        }
        assert!(sink.is_filled_with(1000, 50, 4).unwrap());
        assert!(written.is_filled_with(0, 150, 3).unwrap());
        assert_eq!(counted.load_u32(0), Ok(if atomics { 41 } else { 0 }));
    }
}
