//! Which images a driver takes. A fatbin has parts, each code for one architecture or PTX of one version. What nvcc 13 makes has another ELF ABI version than
//! what nvcc 12 makes, which older drivers do not know; and no driver compiles PTX of a later version than its own. The layout is that of what nvcc 12.4
//! and 13.0 write. Any other image will do: a build without nvcc has none.

use crate::call::{CUresult, CudaResult};
use crate::settings::settings;

const MAGIC: u32 = 0xba55_ed50;
/// Of the device: 9.0.
const ARCHITECTURE: u32 = 90;
const PTX: u16 = 1;
const CODE: u16 = 2;

/// The latest versions that the driver knows: of code, which is the ABI's, and of PTX, which is `major << 16 | minor`.
fn known(driver: i32) -> (u32, u32) {
    let (major, minor) = (driver as u32 / 1000, driver as u32 % 1000 / 10);
    // PTX 8.4 came with CUDA 12.4, and 9.0 with 13.0.
    (if major < 13 { 7 } else { 8 }, (major - 4) << 16 | minor)
}

/// CUDA_ERROR_NO_BINARY_FOR_GPU, or CUDA_ERROR_UNSUPPORTED_PTX_VERSION if there is PTX, for a fatbin of which the driver takes no part.
///
/// # Safety
/// The image is whole.
pub unsafe fn check(image: *const u8) -> CudaResult {
    // SAFETY: within the image, by the lengths that it gives.
    let word = |at: usize| unsafe { image.add(at).cast::<u32>().read_unaligned() };
    // SAFETY: as above.
    let half = |at: usize| unsafe { image.add(at).cast::<u16>().read_unaligned() };
    if word(0) != MAGIC {
        return Ok(());
    }
    let mut at = usize::from(half(6));
    let end = at + word(8) as usize;
    let (code, ptx) = known(settings().driver);
    let mut refused = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU;
    while at < end {
        let (kind, version, architecture) = (half(at), word(at + 24), word(at + 28));
        let is_same = architecture / 10 == ARCHITECTURE / 10 && architecture <= ARCHITECTURE;
        match kind {
            CODE if is_same && version & 0xffff <= code => return Ok(()),
            PTX if architecture <= ARCHITECTURE && version <= ptx => return Ok(()),
            PTX if architecture <= ARCHITECTURE => {
                refused = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
            }
            _ => {}
        }
        at += word(at + 4) as usize + word(at + 8) as usize;
    }
    Err(refused)
}
