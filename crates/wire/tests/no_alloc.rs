//! Nothing on the hot path allocates.
#![allow(unsafe_code)] // Reason: an allocator is unsafe by nature.

mod fixture;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use doorbell_wire::bytecode::Program;
use doorbell_wire::mlx5::{DataSegment, SendRequest};
use fixture::{Completions, Recv, Send};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(black_box(Box::new(1)))), 1);
}

#[test]
fn sends() {
    let mut send = Send::new(64);
    let local = [DataSegment {
        len_bytes: 64,
        lkey: 1,
        addr: 2,
    }; 3];
    let count = allocations(|| {
        let mut program = send.program();
        for round in 0..100u32 {
            let requests = [
                SendRequest::write(1, 2).segments(&local).signaled(true),
                SendRequest::write(1, 2).inline(&[7; 100]),
                SendRequest::fetch_add(1, 2, 3).segments(&[DataSegment {
                    len_bytes: 8,
                    lkey: 1,
                    addr: 2,
                }]),
            ];
            let mut end = 0;
            for request in &requests {
                end = send.queue.post(request).unwrap().end();
            }
            program.clear();
            let commit = send.queue.commit(&mut program).unwrap();
            if round % 2 == 0 {
                send.queue.rollback(commit).unwrap();
                send.queue.post(&requests[0]).unwrap();
                program.clear();
                end = send.queue.commit_blueflame(&mut program).unwrap().upto();
            }
            send.queue.release(end).unwrap();
            black_box(&program);
        }
    });
    assert_eq!(count, 0);
}

#[test]
fn receives() {
    let mut recv = Recv::new(8, 3);
    let local = [DataSegment {
        len_bytes: 64,
        lkey: 1,
        addr: 2,
    }; 2];
    let count = allocations(|| {
        let mut program = Program::new(&recv.targets);
        for _ in 0..100 {
            let posted = recv.queue.post(&local).unwrap();
            program.clear();
            recv.queue.commit(&mut program).unwrap();
            recv.queue.release(posted.index + 1).unwrap();
            black_box(&program);
        }
    });
    assert_eq!(count, 0);
}

#[test]
fn waits() {
    let completions = Completions::new(8);
    let count = allocations(|| {
        let mut program = completions.program();
        for index in 0..100 {
            program.clear();
            completions.queue.peek(index, &mut program).unwrap();
            black_box(completions.queue.cqe(index));
            completions.queue.set_consumer_index(index);
            completions.queue.abort_peek(index);
            for op in program.ops() {
                black_box(op);
            }
        }
    });
    assert_eq!(count, 0);
}
