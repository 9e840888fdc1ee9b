//! The records, the map and the sort.

use anyhow::{Result, ensure};
use doorbell::{Access, Group, Region};

use crate::Options;

pub const KEY: usize = 10;
const RECORD: usize = 100;
/// Bytes of a table entry: offset and length of a partition's block.
pub const ENTRY: u64 = 16;

/// A mapped split. Peers read both regions.
pub struct MapOutput {
    /// The records, by partition.
    pub records: Region,
    /// An entry for each partition.
    pub table: Region,
}

/// A partition that has been sorted.
#[derive(Clone, Copy)]
pub struct Sorted {
    pub records: u64,
    /// The sum of the hashes of its records, in whatever order.
    pub sum: u64,
}

/// Maps a split: generates its records, and writes each into its partition's block.
pub fn map(
    options: &Options,
    group: &Group,
    limits: &[[u8; KEY]],
    split: u32,
) -> Result<MapOutput> {
    let first = u64::from(split) * options.records;
    let keys = (first..first + options.records).map(|number| key(options.seed, number));
    let of_key = |key: &[u8; KEY]| limits.partition_point(|limit| limit <= key);
    let partitions: Vec<usize> = keys.map(|key| of_key(&key)).collect();
    let mut lengths = vec![0_u64; options.partitions as usize];
    for partition in &partitions {
        lengths[*partition] += RECORD as u64;
    }
    let mut entries = Vec::new();
    let mut end = 0;
    for len_bytes in &lengths {
        entries.extend([end, *len_bytes]);
        end += len_bytes;
    }
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let table_bytes = u64::from(options.partitions) * ENTRY;
    let table = Region::alloc(group.domain(), table_bytes, access)?;
    table.write_values(0, &entries)?;
    let records = Region::alloc(group.domain(), end.max(1), access)?;
    let mut at: Vec<u64> = entries.iter().step_by(2).copied().collect();
    for (number, partition) in (first..).zip(&partitions) {
        records.write(at[*partition], &record(options.seed, number))?;
        at[*partition] += RECORD as u64;
    }
    Ok(MapOutput { records, table })
}

/// Sorts a partition that has been fetched, and writes it if that was asked for.
pub fn sort(
    options: &Options,
    fetched: &Region,
    partition: u32,
    (at, len_bytes): (u64, u64),
) -> Result<Sorted> {
    let mut bytes = vec![0; len_bytes as usize];
    fetched.read(at, &mut bytes)?;
    let (records, rest) = bytes.as_chunks_mut::<RECORD>();
    ensure!(rest.is_empty(), "partition {partition} ends in a record");
    // Equal keys are ordered by what follows, so that the result does not depend on the order of arrival.
    records.sort_unstable();
    if let Some(folder) = &options.out {
        std::fs::create_dir_all(folder)?;
        let name = format!("part-{partition:05}");
        let made = folder.join(format!(".{name}.{}", std::process::id()));
        std::fs::write(&made, records.as_flattened())?;
        // A rank that is killed leaves no half of a partition under its name.
        std::fs::rename(&made, folder.join(name))?;
    }
    let hashes = records.iter().map(|record| hash(record));
    Ok(Sorted {
        records: records.len() as u64,
        sum: hashes.fold(0, u64::wrapping_add),
    })
}

pub fn sum_of(region: &Region, len_bytes: u64) -> Result<u64> {
    let mut bytes = vec![0; len_bytes as usize];
    region.read(0, &mut bytes)?;
    Ok(hash(&bytes))
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The key of a record: ten bytes from its number and the seed.
pub fn key(seed: u64, number: u64) -> [u8; KEY] {
    let mut key = [0; KEY];
    let first = mix(seed ^ mix(number));
    key[..8].copy_from_slice(&first.to_be_bytes());
    key[8..].copy_from_slice(&mix(first).to_be_bytes()[..2]);
    key
}

/// A record with the layout of gensort's binary records: key, break, the number in hexadecimal digits, break, filler, break.
fn record(seed: u64, number: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..KEY].copy_from_slice(&key(seed, number));
    record[10..12].copy_from_slice(&[0x00, 0x11]);
    record[12..44].copy_from_slice(format!("{number:032X}").as_bytes());
    record[44..48].copy_from_slice(&[0x88, 0x99, 0xaa, 0xbb]);
    let filler = mix(number).to_be_bytes();
    for (at, byte) in record[48..96].iter_mut().enumerate() {
        *byte = b"0123456789ABCDEF"[usize::from(filler[at / 4 % 8] & 15)];
    }
    record[96..].copy_from_slice(&[0xcc, 0xdd, 0xee, 0xff]);
    record
}

/// One step of splitmix64.
fn mix(state: u64) -> u64 {
    let mut mixed = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
