//! The frame of a call: a header, and attributes with bytes in, bytes out, handles and numbers.

use crate::device::client::Errno;
use crate::device::space::Space;
use crate::doors::abi::{IoctlAttribute, IoctlHeader, Layout};

/// A header with its attributes is a page at most.
const LONGEST: u16 = 4096;
/// `RDMA_DRIVER_MLX5`.
const DRIVER: u32 = 1;
/// `UVERBS_ATTR_F_MANDATORY` and `UVERBS_ATTR_F_VALID_OUTPUT`.
const MANDATORY: u16 = 1;
const VALID_OUTPUT: u16 = 2;
/// Where the flags and the data are in an attribute.
const FLAGS_AT: u64 = 4;
const DATA_AT: u64 = 8;

/// What an attribute of a method is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttributeKind {
    /// Bytes for the method, at least and at most so many; up to 8 lie in the attribute itself.
    In(u16, u16),
    /// Room for bytes, at least so many.
    Out(u16),
    /// The handle of an object, or a descriptor's number.
    Handle,
    /// A handle or descriptor that the method makes.
    New,
}

/// An attribute of a method: its number, what it is, and whether it has to be there.
pub(super) type AttributeSpec = (u16, AttributeKind, bool);

/// The attributes of a call, checked against those of its method.
#[derive(Debug)]
pub(super) struct Arguments {
    space: Space,
    /// Address of the first attribute.
    list_at: u64,
    list: Vec<IoctlAttribute>,
    outputs: Vec<AttributeOutput>,
}

#[derive(Debug)]
enum AttributeOutput {
    Bytes { index: usize, bytes: Vec<u8> },
    Handle { index: usize, value: u64 },
    Valid { index: usize },
}

/// Reads the header of a call.
pub(super) fn header(space: Space, argument: u64) -> Result<IoctlHeader, Errno> {
    let mut bytes = [0; IoctlHeader::BYTES];
    space.read(argument, &mut bytes).map_err(|_| libc::EFAULT)?;
    let header = IoctlHeader::read(&bytes);
    let length = IoctlHeader::BYTES + usize::from(header.num_attrs) * IoctlAttribute::BYTES;
    if header.length > LONGEST || usize::from(header.length) != length {
        return Err(libc::EINVAL);
    }
    if header.reserved1 != 0 || header.reserved2 != 0 {
        return Err(libc::EPROTONOSUPPORT);
    }
    if header.driver_id != DRIVER {
        return Err(libc::EINVAL);
    }
    Ok(header)
}

impl Arguments {
    /// Reads the attributes behind the header, and checks them as the kernel does.
    pub(super) fn read(
        space: Space,
        argument: u64,
        count: u16,
        specs: &[AttributeSpec],
    ) -> Result<Arguments, Errno> {
        let list_at = argument
            .checked_add(IoctlHeader::BYTES as u64)
            .ok_or(libc::EFAULT)?;
        let mut bytes = vec![0; usize::from(count) * IoctlAttribute::BYTES];
        if !bytes.is_empty() {
            space.read(list_at, &mut bytes).map_err(|_| libc::EFAULT)?;
        }
        let list: Vec<IoctlAttribute> = bytes
            .chunks_exact(IoctlAttribute::BYTES)
            .map(IoctlAttribute::read)
            .collect();
        let mut seen = Vec::new();
        for attribute in &list {
            let Some((_, kind, _)) = specs.iter().find(|(id, ..)| *id == attribute.attr_id) else {
                if attribute.flags & MANDATORY != 0 {
                    return Err(libc::EPROTONOSUPPORT);
                }
                continue;
            };
            let fits = match kind {
                AttributeKind::In(least, most) => (*least..=*most).contains(&attribute.len),
                AttributeKind::Out(least) => attribute.len >= *least,
                AttributeKind::Handle | AttributeKind::New => attribute.len == 0,
            };
            if !fits || attribute.attr_data != 0 || seen.contains(&attribute.attr_id) {
                return Err(libc::EINVAL);
            }
            seen.push(attribute.attr_id);
        }
        if specs
            .iter()
            .any(|(id, _, needed)| *needed && !seen.contains(id))
        {
            return Err(libc::EINVAL);
        }
        Ok(Arguments {
            space,
            list_at,
            list,
            outputs: Vec::new(),
        })
    }

    fn find(&self, id: u16) -> Option<(usize, &IoctlAttribute)> {
        self.list
            .iter()
            .enumerate()
            .find(|(_, attribute)| attribute.attr_id == id)
    }

    /// Length of an attribute; 0 if it is not there.
    pub(super) fn length(&self, id: u16) -> usize {
        self.find(id).map_or(0, |(_, it)| usize::from(it.len))
    }

    /// The bytes of an attribute; none if it is not there.
    pub(super) fn bytes(&self, id: u16) -> Result<Vec<u8>, Errno> {
        let Some((_, attribute)) = self.find(id) else {
            return Ok(Vec::new());
        };
        let length = usize::from(attribute.len);
        if length <= 8 {
            let inline = attribute.data.to_ne_bytes();
            return Ok(inline.iter().take(length).copied().collect());
        }
        let mut bytes = vec![0; length];
        self.space
            .read(attribute.data, &mut bytes)
            .map_err(|_| libc::EFAULT)?;
        Ok(bytes)
    }

    /// A number that lies in the attribute: EINVAL if it is beyond `most`, 0 if the attribute is not there.
    pub(super) fn number(&self, id: u16, most: u64) -> Result<u64, Errno> {
        let value = self.find(id).map_or(0, |(_, it)| it.data);
        (value <= most).then_some(value).ok_or(libc::EINVAL)
    }

    /// Flags of four or eight bytes; none if the attribute is not there. EINVAL for more than 32.
    pub(super) fn flags(&self, id: u16) -> Result<u32, Errno> {
        let Some((_, attribute)) = self.find(id) else {
            return Ok(0);
        };
        match attribute.len {
            8 => u32::try_from(attribute.data).map_err(|_| libc::EINVAL),
            4 => Ok(attribute.data as u32),
            _ => Err(libc::EINVAL),
        }
    }

    /// Flags, for a method that has none.
    pub(super) fn no_flags(&self, id: u16) -> Result<(), Errno> {
        match self.flags(id)? {
            0 => Ok(()),
            _ => Err(libc::EINVAL),
        }
    }

    /// A word of four bytes.
    pub(super) fn word(&self, id: u16) -> Result<u32, Errno> {
        let bytes = self.bytes(id)?;
        let word = bytes.first_chunk();
        Ok(word.map_or(0, |bytes| u32::from_ne_bytes(*bytes)))
    }

    /// A word of eight bytes.
    pub(super) fn long(&self, id: u16) -> u64 {
        self.find(id).map_or(0, |(_, it)| it.data)
    }

    /// Whether the call has it.
    pub(super) fn has(&self, id: u16) -> bool {
        self.find(id).is_some()
    }

    /// The descriptor's number in an attribute.
    pub(super) fn descriptor(&self, id: u16) -> Result<i32, Errno> {
        let (_, attribute) = self.find(id).ok_or(libc::EINVAL)?;
        i32::try_from(attribute.data as i64).map_err(|_| libc::EBADF)
    }

    /// The handle in an attribute.
    pub(super) fn handle(&self, id: u16) -> Result<u32, Errno> {
        let (_, attribute) = self.find(id).ok_or(libc::EINVAL)?;
        u32::try_from(attribute.data).map_err(|_| libc::EINVAL)
    }

    /// Bytes to be written when the call has succeeded: as many as the caller has room for.
    pub(super) fn answer(&mut self, id: u16, bytes: &[u8]) {
        if let Some((index, attribute)) = self.find(id) {
            let bytes = bytes.iter().take(usize::from(attribute.len)).copied();
            let bytes = bytes.collect();
            self.outputs.push(AttributeOutput::Bytes { index, bytes });
        }
    }

    /// The same, and zeros into what room is left.
    pub(super) fn answer_and_clear(&mut self, id: u16, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        bytes.resize(self.length(id), 0);
        self.answer(id, &bytes);
    }

    /// Says that an output is valid, whether or not something was written.
    pub(super) fn mark_valid(&mut self, id: u16) {
        if let Some((index, _)) = self.find(id) {
            self.outputs.push(AttributeOutput::Valid { index });
        }
    }

    /// The handle of what was made.
    pub(super) fn answer_handle(&mut self, id: u16, value: u64) {
        if let Some((index, _)) = self.find(id) {
            self.outputs.push(AttributeOutput::Handle { index, value });
        }
    }

    /// How many answers there are so far.
    pub(super) fn answers(&self) -> usize {
        self.outputs.len()
    }

    /// Forgets the answers behind so many.
    pub(super) fn withdraw_answers(&mut self, answers: usize) {
        self.outputs.truncate(answers);
    }

    /// Writes the answers into the process.
    pub(super) fn write_answers(&self) -> Result<(), Errno> {
        for output in &self.outputs {
            let (AttributeOutput::Bytes { index, .. }
            | AttributeOutput::Handle { index, .. }
            | AttributeOutput::Valid { index }) = *output;
            let Some(attribute) = self.list.get(index) else {
                continue;
            };
            let at = self
                .list_at
                .wrapping_add((index * IoctlAttribute::BYTES) as u64);
            match output {
                AttributeOutput::Bytes { bytes, .. } if !bytes.is_empty() => {
                    self.write(attribute.data, bytes)?;
                }
                AttributeOutput::Handle { value, .. } => {
                    self.write(at.wrapping_add(DATA_AT), &value.to_ne_bytes())?;
                    continue;
                }
                _ => {}
            }
            let flags = attribute.flags | VALID_OUTPUT;
            self.write(at.wrapping_add(FLAGS_AT), &flags.to_ne_bytes())?;
        }
        Ok(())
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.space.write(address, bytes).map_err(|_| libc::EFAULT)
    }
}
