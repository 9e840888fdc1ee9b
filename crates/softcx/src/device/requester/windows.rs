//! Memory windows: bound and closed by work requests, in their order.

use crate::device::keys::{Access, Binding, Refused};
use crate::device::qp::{DeviceParts, Qp};
use doorbell_wire::mlx5::{Syndrome, WindowUpdate};

impl Qp {
    /// Carries out the window operation at the cursor, once: a message that is passed again because the requester went back has
    /// nothing left to do.
    pub(super) fn update_window(&mut self, context: &mut DeviceParts) {
        let requester = &mut self.requester;
        let Some(message) = requester.messages.get_mut(requester.cursor) else {
            return;
        };
        let update = message.window.take();
        let done = update.map_or(Ok(()), |update| self.carry_out(context, &update));
        if done.is_err()
            && let Some(message) = self.requester.messages.get_mut(self.requester.cursor)
        {
            message.failed = Some(Syndrome::MwBind);
        }
    }

    fn carry_out(&self, context: &mut DeviceParts, update: &WindowUpdate) -> Result<(), Refused> {
        let by = self.accessor();
        let nothing = Binding {
            region: 0,
            addr: 0,
            len_bytes: 0,
            iova: 0,
            access: Access::LOCAL_READ,
        };
        let binding = match update.opens {
            // A window of type 2 is closed by its own kind of request.
            None if update.qpn.is_some() => return context.keys.invalidate(update.key, by),
            None => nothing,
            Some(opens) => Binding {
                region: opens.region,
                addr: opens.addr,
                len_bytes: opens.len_bytes,
                iova: opens.iova,
                access: Access::from_bits(opens.access).ok_or(Refused)?,
            },
        };
        context
            .keys
            .bind(update.key, update.new_key(), by, &binding)
    }
}
