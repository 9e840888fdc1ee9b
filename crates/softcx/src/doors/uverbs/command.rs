//! The commands of the older interface, which the method INVOKE_WRITE carries.

use super::arguments::{Arguments, AttributeKind, AttributeSpec};
use super::{DRIVER_IN, DRIVER_OUT, UverbsCall};
use super::{ah, completion_channel, cq, device, mr, multicast, mw, pd, qp, srq};
use crate::device::State;
use crate::device::client::{Errno, mask};
use crate::device::commands::CommandKind;
use crate::doors::abi::*;

/// `UVERBS_ATTR_CORE_IN`, `_CORE_OUT` and `_WRITE_CMD`.
const IN: u16 = 0;
const OUT: u16 = 1;
const NUMBER: u16 = 2;

pub(super) const ATTRIBUTES: &[AttributeSpec] = &[
    (IN, AttributeKind::In(4, u16::MAX), false),
    (OUT, AttributeKind::Out(0), false),
    (NUMBER, AttributeKind::In(8, 8), true),
    DRIVER_IN,
    DRIVER_OUT,
];

/// `IB_USER_VERBS_CMD_FLAG_EXTENDED` and `IB_USER_VERBS_CMD_COMMAND_MASK`.
const EXTENDED: u32 = 1 << 31;
const NUMBER_MASK: u32 = 0xff;

/// A command: number, least sizes of request and response, and what it does.
struct UverbsCommand(
    u32,
    usize,
    usize,
    fn(&mut UverbsCall<'_>) -> Result<(), Errno>,
);

/// In the order of `ib_uverbs_write_cmds`. An extended response may end with `response_length`.
const COMMANDS: &[UverbsCommand] = &[
    UverbsCommand(
        0,
        GetContext::BYTES,
        GetContextResp::BYTES,
        device::get_context,
    ),
    UverbsCommand(1, QueryDevice::BYTES, QueryDeviceResp::BYTES, device::query),
    UverbsCommand(
        2,
        QueryPort::BYTES,
        QueryPortResp::BYTES,
        device::query_port,
    ),
    UverbsCommand(3, AllocPd::BYTES, AllocPdResp::BYTES, pd::alloc),
    UverbsCommand(4, DeallocPd::BYTES, 0, pd::dealloc),
    UverbsCommand(5, CreateAh::BYTES, CreateAhResp::BYTES, ah::create),
    UverbsCommand(8, DestroyAh::BYTES, 0, ah::destroy),
    UverbsCommand(9, RegMr::BYTES, RegMrResp::BYTES, mr::reg),
    UverbsCommand(11, ReregMr::BYTES, ReregMrResp::BYTES, mr::rereg),
    UverbsCommand(13, DeregMr::BYTES, 0, mr::dereg),
    UverbsCommand(14, AllocMw::BYTES, AllocMwResp::BYTES, mw::alloc),
    UverbsCommand(16, DeallocMw::BYTES, 0, mw::dealloc),
    UverbsCommand(
        17,
        CreateCompChannel::BYTES,
        CreateCompChannelResp::BYTES,
        completion_channel::create,
    ),
    UverbsCommand(18, CreateCq::BYTES, CreateCqResp::BYTES, cq::create),
    UverbsCommand(19, ResizeCq::BYTES, ResizeCqResp::BYTES, cq::resize),
    UverbsCommand(20, DestroyCq::BYTES, DestroyCqResp::BYTES, cq::destroy),
    UverbsCommand(24, CreateQp::BYTES, CreateQpResp::BYTES, qp::create),
    UverbsCommand(25, QueryQp::BYTES, QueryQpResp::BYTES, qp::query),
    UverbsCommand(26, ModifyQp::BYTES, 0, qp::modify),
    UverbsCommand(27, DestroyQp::BYTES, DestroyQpResp::BYTES, qp::destroy),
    UverbsCommand(30, Multicast::BYTES, 0, multicast::attach),
    UverbsCommand(31, Multicast::BYTES, 0, multicast::detach),
    UverbsCommand(32, CreateSrq::BYTES, CreateSrqResp::BYTES, srq::create),
    UverbsCommand(33, ModifySrq::BYTES, 0, srq::modify),
    UverbsCommand(34, QuerySrq::BYTES, QuerySrqResp::BYTES, srq::query),
    UverbsCommand(35, DestroySrq::BYTES, DestroySrqResp::BYTES, srq::destroy),
    UverbsCommand(
        39,
        CreateXsrq::BYTES,
        CreateSrqResp::BYTES,
        srq::create_extended,
    ),
    UverbsCommand(
        EXTENDED | 1,
        ExQueryDevice::BYTES,
        QueryDeviceResp::BYTES + 8,
        device::query_extended,
    ),
    UverbsCommand(
        EXTENDED | 18,
        ExCreateCq::BYTES,
        ExCreateCqResp::BYTES,
        cq::create_extended,
    ),
    // As far as `comp_mask`.
    UverbsCommand(
        EXTENDED | 24,
        ExCreateQp::BYTES - 12,
        ExCreateQpResp::BYTES,
        qp::create_extended,
    ),
    // As far as `base`.
    UverbsCommand(
        EXTENDED | 26,
        ModifyQp::BYTES,
        ExModifyQpResp::BYTES,
        qp::modify_extended,
    ),
    UverbsCommand(EXTENDED | 57, ExModifyCq::BYTES, 0, cq::modify),
];

/// The command of the device that a call leads to.
pub(super) fn kind(arguments: &Arguments) -> Option<CommandKind> {
    let number = arguments.number(NUMBER, u64::from(u32::MAX)).ok()? as u32;
    match number & !EXTENDED {
        18 | 24 | 32 | 39 => Some(CommandKind::Create),
        19 | 33 => Some(CommandKind::Modify),
        20 | 27 | 35 => Some(CommandKind::Destroy),
        9 | 11 => Some(CommandKind::Register),
        13 => Some(CommandKind::Deregister),
        26 => {
            let bytes = arguments.bytes(IN).ok()?;
            let request = (bytes.len() >= ModifyQp::BYTES).then(|| ModifyQp::read(&bytes))?;
            let is_to = |state: State| {
                request.attr_mask & mask::STATE != 0 && request.qp_state == state as u8
            };
            Some(match () {
                () if is_to(State::Error) => CommandKind::Error,
                () if is_to(State::Reset) => CommandKind::Reset,
                () => CommandKind::Modify,
            })
        }
        _ => None,
    }
}

/// INVOKE_WRITE.
pub(super) fn invoke(call: &mut UverbsCall<'_>) -> Result<(), Errno> {
    let number = call.arguments.number(NUMBER, u64::from(u32::MAX))? as u32;
    if number & !(EXTENDED | NUMBER_MASK) != 0 {
        return Err(libc::EINVAL);
    }
    let command = COMMANDS.iter().find(|command| command.0 == number);
    let Some(UverbsCommand(_, request, response, run)) = command else {
        return Err(libc::EOPNOTSUPP);
    };
    if call.arguments.length(IN) < *request || call.arguments.length(OUT) < *response {
        return Err(libc::ENOSPC);
    }
    if number != 0 {
        call.opened()?;
    }
    run(call)?;
    call.arguments.mark_valid(DRIVER_OUT.0);
    Ok(())
}

impl UverbsCall<'_> {
    pub(super) fn request<T: Layout>(&self) -> Result<T, Errno> {
        Ok(T::read(&self.arguments.bytes(IN)?))
    }

    /// A request that a newer caller may have lengthened: EOPNOTSUPP if there is something in what is not known here.
    pub(super) fn extended_request<T: Layout>(&self) -> Result<T, Errno> {
        let bytes = self.arguments.bytes(IN)?;
        if bytes.iter().skip(T::BYTES).any(|byte| *byte != 0) {
            return Err(libc::EOPNOTSUPP);
        }
        Ok(T::read(&bytes))
    }

    pub(super) fn respond<T: Layout>(&mut self, response: T) {
        self.arguments.answer_and_clear(OUT, &response.to_bytes());
    }

    /// How much of an extended response the caller takes.
    pub(super) fn response_length<T: Layout>(&self) -> u32 {
        self.arguments.length(OUT).min(T::BYTES) as u32
    }
}
