//! Tasks of one thread under tokio, each with a pair of endpoints: a ticket is awaited, and an eventfd is waited for as tokio waits for sockets. No
//! task blocks the others.
//!
//!     cargo run --release --example tokio [TASKS]
#![allow(unsafe_code)] // creates an eventfd

use std::error::Error;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use doorbell::{Access, Device, Endpoint, EndpointConfig, Region, Result, Work};
use tokio::io::unix::AsyncFd;

#[allow(dead_code)] // Reason: a test has this file as a module.
fn main() -> std::result::Result<(), Box<dyn Error>> {
    let tasks = std::env::args().nth(1);
    let tasks = tasks.map_or(Ok(4), |text| text.parse::<usize>())?;
    println!("{} bytes arrived", transfers("softcx", tasks)?);
    Ok(())
}

/// Runs `tasks` tasks in this thread. Returns how many bytes have arrived.
pub fn transfers(device: &str, tasks: usize) -> std::result::Result<usize, Box<dyn Error>> {
    let device = Device::open(device)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let local = tokio::task::LocalSet::new();
    let handles: Vec<_> = (0..tasks)
        .map(|task| local.spawn_local(transfer(device.clone(), task as u8)))
        .collect();
    local.block_on(&runtime, async {
        let mut bytes = 0;
        for handle in handles {
            bytes += handle.await??;
        }
        Ok(bytes)
    })
}

/// Sends a message, and returns how many bytes have arrived.
async fn transfer(device: Device, value: u8) -> Result<usize> {
    let domain = device.protection_domain();
    let config = EndpointConfig::default();
    let (mut a, mut b) = (
        Endpoint::new(&domain, &config)?,
        Endpoint::new(&domain, &config)?,
    );
    a.connect(&b.address())?;
    b.connect(&a.address())?;
    let region = Region::alloc(&domain, 4096, Access::ALL)?;
    region.fill(0, 64, value)?;

    let received = b.post_recv(1, &[region.slice(1024, 64)?])?;
    // The descriptor counts the tickets that are over. A program that has an event loop of its own gives it to epoll.
    let readable = eventfd()?;
    received.notify(readable.get_ref().as_fd())?;
    // A ticket is a future.
    a.post_send(&Work::send(&[region.slice(0, 64)?]))?.await?;
    readable
        .readable()
        .await
        .map_err(|error| system(&error))?
        .clear_ready();
    assert!(received.check()?);

    let mut bytes = [0; 64];
    region.read(1024, &mut bytes)?;
    Ok(bytes.iter().filter(|byte| **byte == value).count())
}

fn eventfd() -> Result<AsyncFd<OwnedFd>> {
    // SAFETY: makes a descriptor.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(system(&std::io::Error::last_os_error()));
    }
    // SAFETY: just made, and owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the descriptor is the object's own, which drops both.
    unsafe { AsyncFd::register(fd) }.map_err(|error| system(&error.into_parts().1))
}

fn system(error: &std::io::Error) -> doorbell::Error {
    doorbell::Error::System {
        operation: "eventfd",
        errno: error.raw_os_error().unwrap_or(0),
    }
}
