//! What a work request costs the CPU that posts it: the library's post and commit, and `ibv_post_send` of libmlx5, on queue pairs of one
//! device in one run. For `scripts/post-cost`; needs a device, a card or the software ConnectX behind a door.
//!
//!     doorbell softcx run --door preload -- target/release/examples/post_cost time
#![allow(unsafe_code)] // Reason: calls libibverbs, and gives the queues their memory.

use std::hint::black_box;
use std::ptr::{NonNull, null_mut};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use doorbell::__private::{Owner, execute};
use doorbell_dv_sys as dv;
use doorbell_wire::bytecode::{Program, Role, TargetId, Targets};
use doorbell_wire::mlx5::{
    CqRing, CqRingConfig, DataSegment, SendQueue, SendQueueConfig, SendRequest,
};
use rdma_sys as verbs;

/// Posts between two looks at the completion queue.
const BATCH: u32 = 256;
const DEPTH: u32 = 1024;
const LEN_BYTES: u32 = 64;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let case = arguments.next().unwrap_or_default();
    let rounds: u32 = arguments.next().map_or(Ok(64), |rounds| rounds.parse())?;
    let device = Device::open()?;
    match case.as_str() {
        "ours" => drop(Ours::new(&device)?.batches(rounds, Ours::one_ours)?),
        "rung" => drop(Ours::new(&device)?.batches(rounds, Ours::one_rung)?),
        "theirs" => drop(Theirs::new(&device, false)?.batches(rounds)?),
        "time" => {
            let mut ours = Ours::new(&device)?;
            let mut theirs = Theirs::new(&device, false)?;
            let mut alone = Theirs::new(&device, true)?;
            // In turn, so that other load of the machine affects all of them.
            let mut best = [Duration::MAX; 4];
            for _ in 0..rounds {
                let taken = [
                    ours.batches(1, Ours::one_ours)?,
                    ours.batches(1, Ours::one_rung)?,
                    theirs.batches(1)?,
                    alone.batches(1)?,
                ];
                for (best, taken) in best.iter_mut().zip(taken) {
                    *best = taken.min(*best);
                }
            }
            let names = [
                "post + commit",
                "post + commit + doorbell by the caller",
                "ibv_post_send",
                "ibv_post_send, thread domain of its own",
            ];
            for (name, best) in names.iter().zip(best) {
                let each = best.as_nanos() as f64 / f64::from(BATCH);
                println!("{name:<40} {each:7.1} ns");
            }
        }
        _ => bail!("usage: post_cost ours|rung|theirs|time [ROUNDS]"),
    }
    Ok(())
}

fn some<T>(call: &'static str, made: *mut T) -> Result<*mut T> {
    let error = std::io::Error::last_os_error();
    ensure!(!made.is_null(), "{call}: {error}");
    Ok(made)
}

fn zero(call: &'static str, errno: i32) -> Result<()> {
    ensure!(
        errno == 0,
        "{call}: {}",
        std::io::Error::from_raw_os_error(errno)
    );
    Ok(())
}

/// The first device, with memory to write from and to. Everything lives until the process ends.
struct Device {
    context: *mut verbs::ibv_context,
    pd: *mut verbs::ibv_pd,
    memory: &'static [u64; 1024],
    key: u32,
    port: dv::doorbell_dv_port,
    gid: [u8; 16],
}

impl Device {
    fn open() -> Result<Device> {
        // SAFETY: calls of libibverbs in their order, each with what the one before gave.
        unsafe {
            let list = some(
                "ibv_get_device_list",
                verbs::ibv_get_device_list(null_mut()),
            )?;
            let context = some(
                "ibv_open_device",
                verbs::ibv_open_device(some("ibv_get_device_list", *list)?),
            )?;
            let pd = some("ibv_alloc_pd", verbs::ibv_alloc_pd(context))?;
            let memory: &'static [u64; 1024] = Box::leak(Box::new([0; 1024]));
            let start = std::ptr::from_ref(memory).cast_mut().cast();
            let mr = some("ibv_reg_mr", verbs::ibv_reg_mr(pd, start, 8192, 7))?;
            let mut port = dv::doorbell_dv_port::default();
            zero(
                "ibv_query_port",
                dv::doorbell_dv_query_port(context, 1, &raw mut port),
            )?;
            let mut gid = dv::doorbell_dv_gid::default();
            zero(
                "ibv_query_gid_ex",
                dv::doorbell_dv_query_gid(context, 1, 0, &raw mut gid),
            )?;
            Ok(Device {
                context,
                pd,
                memory,
                key: (*mr).lkey,
                port,
                gid: gid.raw,
            })
        }
    }

    fn address(&self) -> u64 {
        self.memory.as_ptr().addr() as u64
    }

    /// Two completion queues.
    fn cqs(&self) -> Result<[*mut verbs::ibv_cq; 2]> {
        let make = || {
            // SAFETY: an open context, no channel.
            let cq = unsafe {
                verbs::ibv_create_cq(
                    self.context,
                    (2 * DEPTH - 1) as i32,
                    null_mut(),
                    null_mut(),
                    0,
                )
            };
            some("ibv_create_cq", cq)
        };
        Ok([make()?, make()?])
    }

    fn own_domain(&self) -> Result<*mut verbs::ibv_pd> {
        // SAFETY: an open context and a domain of it.
        unsafe {
            let td = some("ibv_alloc_td", dv::doorbell_dv_alloc_td(self.context))?;
            some(
                "ibv_alloc_parent_domain",
                dv::doorbell_dv_alloc_parent_domain(self.pd, td, std::ptr::null()),
            )
        }
    }

    /// Connects a queue pair to itself.
    fn connect(&self, qp: *mut verbs::ibv_qp) -> Result<()> {
        use verbs::{ibv_qp_attr_mask as Mask, ibv_qp_state as State};
        // SAFETY: plain numbers, for which zero is a value; then calls with the attributes that their masks name.
        unsafe {
            let mut attr: verbs::ibv_qp_attr = std::mem::zeroed();
            attr.port_num = 1;
            attr.qp_access_flags = 7;
            attr.path_mtu = 5;
            attr.dest_qp_num = (*qp).qp_num;
            attr.max_dest_rd_atomic = 1;
            attr.max_rd_atomic = 1;
            attr.min_rnr_timer = 1;
            attr.timeout = 14;
            attr.retry_cnt = 7;
            attr.rnr_retry = 7;
            attr.ah_attr.port_num = 1;
            attr.ah_attr.dlid = self.port.lid;
            attr.ah_attr.is_global = u8::from(self.port.link_layer == 2);
            attr.ah_attr.grh.dgid.raw = self.gid;
            attr.ah_attr.grh.hop_limit = 1;
            let steps = [
                (
                    State::IBV_QPS_INIT,
                    Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS,
                ),
                (
                    State::IBV_QPS_RTR,
                    Mask::IBV_QP_AV
                        | Mask::IBV_QP_PATH_MTU
                        | Mask::IBV_QP_DEST_QPN
                        | Mask::IBV_QP_RQ_PSN
                        | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
                        | Mask::IBV_QP_MIN_RNR_TIMER,
                ),
                (
                    State::IBV_QPS_RTS,
                    Mask::IBV_QP_TIMEOUT
                        | Mask::IBV_QP_RETRY_CNT
                        | Mask::IBV_QP_RNR_RETRY
                        | Mask::IBV_QP_SQ_PSN
                        | Mask::IBV_QP_MAX_QP_RD_ATOMIC,
                ),
            ];
            for (state, mask) in steps {
                attr.qp_state = state;
                let mask = (mask | Mask::IBV_QP_STATE).0 as i32;
                zero(
                    "ibv_modify_qp",
                    verbs::ibv_modify_qp(qp, &raw mut attr, mask),
                )?;
            }
        }
        Ok(())
    }
}

/// A queue pair as libmlx5 makes and uses it.
struct Theirs {
    qp: *mut verbs::ibv_qp,
    cq: *mut verbs::ibv_cq,
    sge: verbs::ibv_sge,
    remote: (u64, u32),
}

impl Theirs {
    fn new(device: &Device, alone: bool) -> Result<Theirs> {
        let [cq, recv_cq] = device.cqs()?;
        let pd = if alone {
            device.own_domain()?
        } else {
            device.pd
        };
        // SAFETY: plain numbers and pointers, for which zero is a value; live objects.
        let qp = unsafe {
            let mut attr: verbs::ibv_qp_init_attr = std::mem::zeroed();
            attr.send_cq = cq;
            attr.recv_cq = recv_cq;
            attr.qp_type = verbs::ibv_qp_type::IBV_QPT_RC;
            attr.cap.max_send_wr = DEPTH;
            attr.cap.max_send_sge = 1;
            attr.cap.max_recv_wr = 1;
            attr.cap.max_recv_sge = 1;
            some("ibv_create_qp", verbs::ibv_create_qp(pd, &raw mut attr))?
        };
        device.connect(qp)?;
        Ok(Theirs {
            qp,
            cq,
            sge: verbs::ibv_sge {
                addr: device.address(),
                length: LEN_BYTES,
                lkey: device.key,
            },
            remote: (device.address() + 4096, device.key),
        })
    }

    /// The time that the posts took, without the waiting.
    fn batches(&mut self, batches: u32) -> Result<Duration> {
        let mut taken = Duration::ZERO;
        for _ in 0..batches {
            let started = Instant::now();
            for round in 0..BATCH {
                zero("ibv_post_send", self.one_theirs(black_box(round)))?;
            }
            taken += started.elapsed();
            let mut left = BATCH;
            // SAFETY: plain numbers, for which zero is a value.
            let mut wc: verbs::ibv_wc = unsafe { std::mem::zeroed() };
            while left > 0 {
                // SAFETY: a live queue, and a place for one completion.
                match unsafe { verbs::ibv_poll_cq(self.cq, 1, &raw mut wc) } {
                    1 => {
                        ensure!(wc.status == 0, "completion status {}", wc.status);
                        left -= 1;
                    }
                    0 => std::thread::yield_now(),
                    _ => bail!("ibv_poll_cq failed"),
                }
            }
        }
        Ok(taken)
    }

    /// The measured function. Not inlined: callgrind counts while it runs.
    #[inline(never)]
    fn one_theirs(&mut self, round: u32) -> i32 {
        // SAFETY: plain numbers and pointers, for which zero is a value; the request and its list live through the call.
        unsafe {
            let mut wr: verbs::ibv_send_wr = std::mem::zeroed();
            wr.wr_id = round.into();
            wr.sg_list = &raw mut self.sge;
            wr.num_sge = 1;
            wr.opcode = verbs::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            wr.send_flags = verbs::ibv_send_flags::IBV_SEND_SIGNALED.0;
            wr.wr.rdma.remote_addr = self.remote.0;
            wr.wr.rdma.rkey = self.remote.1;
            let mut bad = null_mut();
            verbs::ibv_post_send(self.qp, &raw mut wr, &raw mut bad)
        }
    }
}

/// A queue pair with the library's queues over its memory.
struct Ours {
    send: SendQueue,
    cq: CqRing,
    program: Program,
    next_cqe: u32,
    owner: Memory,
    list: [DataSegment; 1],
    remote: (u64, u32),
}

/// Where the targets lie.
struct Memory {
    targets: Targets,
    bases: Vec<(TargetId, NonNull<u8>)>,
}

// SAFETY: addresses of queues that live until the process ends.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

// SAFETY: the bases are those of memory as long as the targets, which is never freed.
unsafe impl Owner for Memory {
    fn targets(&self) -> &Targets {
        &self.targets
    }

    fn base(&self, target: TargetId) -> Option<NonNull<u8>> {
        let found = self.bases.iter().find(|(id, _)| *id == target)?;
        Some(found.1)
    }
}

impl Ours {
    fn new(device: &Device) -> Result<Ours> {
        let [send_cq, recv_cq] = device.cqs()?;
        let sizes = dv::doorbell_dv_sizes {
            send_wqebbs: DEPTH,
            recv_wqes: 1,
            recv_segments: 1,
            atomics: 1,
            datagrams: 0,
        };
        let mut queues = dv::doorbell_dv_queues::default();
        // SAFETY: live objects of one context.
        let qp = unsafe {
            let pd = device.own_domain()?;
            let qp = some(
                "mlx5dv_create_qp",
                dv::doorbell_dv_create_qp(pd, send_cq, recv_cq, &sizes),
            )?;
            zero(
                "mlx5dv_init_obj",
                dv::doorbell_dv_queues(qp, send_cq, recv_cq, &raw mut queues),
            )?;
            qp
        };
        device.connect(qp)?;
        let mut memory = Memory {
            targets: Targets::new(),
            bases: Vec::new(),
        };
        let marks: &'static mut [u32] = vec![0; queues.send_cqes as usize].leak();
        let mut register = |name, role, len_bytes, base: *mut u8| {
            let target = memory.targets.register(name, role, len_bytes);
            let base = NonNull::new(base).context("mlx5dv gave no address")?;
            memory.bases.push((target.id(), base));
            anyhow::Ok(target)
        };
        let record = register("dbrec", Role::DoorbellRecord, 8, queues.record.cast())?;
        let uar_bytes = queues.uar_bytes.max(8);
        let second = queues.uar.wrapping_add(queues.uar_bytes as usize);
        let uar = [
            register("uar0", Role::Uar, uar_bytes.into(), queues.uar)?,
            register("uar1", Role::Uar, uar_bytes.into(), second)?,
        ];
        let cqes = u64::from(queues.send_cqes);
        let completions = register("cq", Role::Completions, cqes * 64, queues.send_cq)?;
        let marks_target = register("marks", Role::Marks, cqes * 4, marks.as_mut_ptr().cast())?;
        // SAFETY: the memory is that of the queue pair, which lives until the process ends.
        let (send, cq) = unsafe {
            let send = SendQueue::new(SendQueueConfig {
                ring: queues.send_ring,
                wqebb_count: queues.send_wqebbs,
                qpn: (*qp).qp_num,
                max_segments: 4,
                max_inline_bytes: 64,
                record: record.dword(4)?,
                uar: [uar[0].block(0, uar_bytes)?, uar[1].block(0, uar_bytes)?],
            })?;
            let cq = CqRing::new(CqRingConfig {
                ring: queues.send_cq,
                cqe_count: queues.send_cqes,
                record: queues.send_cq_record,
                marks: marks.as_mut_ptr(),
                completions,
                marks_target,
            })?;
            (send, cq)
        };
        cq.reset();
        let program = Program::new(&memory.targets);
        Ok(Ours {
            send,
            cq,
            program,
            next_cqe: 0,
            owner: memory,
            list: [DataSegment {
                len_bytes: LEN_BYTES,
                lkey: device.key,
                addr: device.address(),
            }],
            remote: (device.address() + 4096, device.key),
        })
    }

    /// The time that the posts took, without the waiting.
    fn batches(&mut self, batches: u32, one: fn(&mut Ours, u32)) -> Result<Duration> {
        let mut taken = Duration::ZERO;
        for _ in 0..batches {
            let started = Instant::now();
            for round in 0..BATCH {
                self.program.clear();
                one(self, black_box(round));
            }
            taken += started.elapsed();
            // The last program's doorbell covers all work requests before it, too.
            execute(&self.program, &self.owner, 0);
            for _ in 0..BATCH {
                while self.cq.cqe(self.next_cqe).is_none() {
                    std::thread::yield_now();
                }
                let cqe = self.cq.cqe(self.next_cqe).context("a completion")?;
                ensure!(!cqe.opcode.is_error(), "completion {cqe:?}");
                self.next_cqe = self.next_cqe.wrapping_add(1);
            }
            self.cq.set_consumer_index(self.next_cqe);
            self.send.release(self.send.producer_index())?;
        }
        Ok(taken)
    }

    /// As [`Theirs::one_theirs`].
    #[inline(never)]
    fn one_ours(&mut self, round: u32) {
        let list = [DataSegment {
            addr: self.list[0].addr + u64::from(round & 7),
            ..self.list[0]
        }];
        let request = SendRequest::write(self.remote.0, self.remote.1)
            .segments(&list)
            .signaled(true);
        self.send.post(&request).expect("the queue has room");
        self.send
            .commit(&mut self.program)
            .expect("the program has room");
    }

    /// And the doorbell, as `Endpoint::post_send` has the calling thread ring it.
    #[inline(never)]
    fn one_rung(&mut self, round: u32) {
        self.one_ours(round);
        execute(&self.program, &self.owner, 0);
    }
}
