//! Queue pairs of any verbs device: a relay consumes queues in memory of the library and posts by plain verbs.

use std::sync::Arc;

use super::peer::PeerQueuePair;
use super::{Abilities, Attributes, Capacity, NicQueuePair, Queues, State};
use crate::Result;
use crate::verbs::{self, Relay, Step, Steps};

#[derive(Debug)]
pub(super) struct RelayQueuePair(Relay);

impl RelayQueuePair {
    pub(super) fn new(domain: &Arc<verbs::Domain>, capacity: &Capacity) -> Result<RelayQueuePair> {
        Ok(RelayQueuePair(Relay::new(domain, capacity)?))
    }
}

impl NicQueuePair for RelayQueuePair {
    fn queues(&self) -> Queues<'_> {
        Queues::Mlx5(self.0.memory())
    }

    fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    fn qpn(&self) -> u32 {
        self.0.states().qpn()
    }

    #[inline]
    fn state(&self) -> State {
        self.0.state()
    }

    fn overrun(&self) -> bool {
        self.0.states().overrun()
    }

    fn poll_async_events(&self) {
        // And for completions: the watchdog looks at endpoints that are not polled.
        self.0.turn();
        self.0.states().poll_async_events();
    }

    #[inline]
    fn progress(&self) -> bool {
        self.0.turn()
    }

    #[inline]
    fn rung(&self) {
        self.0.rung();
    }

    fn holds_work(&self) -> bool {
        self.0.holds_work()
    }

    fn wait_receives_posted(&self) {
        self.0.wait_receives_posted();
    }

    fn direct(&self) -> Result<&'static str, String> {
        Err(format!(
            "`{}` is used through plain verbs, which expose no doorbell register, so a CPU thread must post",
            self.0.device_name()
        ))
    }

    fn abilities(&self) -> Abilities {
        self.0.abilities()
    }

    fn mtu_bytes(&self) -> u32 {
        self.0.states().mtu_bytes()
    }

    fn local(&self) -> PeerQueuePair {
        self.0.states().local().into()
    }

    fn init(&self, attributes: Attributes) -> Result<()> {
        self.0.states().init(attributes)
    }

    fn connect(&self, peer: &PeerQueuePair) -> Result<()> {
        self.0.connect(&peer.verbs()?)
    }

    fn activate(&self) -> Result<()> {
        self.0.activate()
    }

    fn connect_by(&self, steps: &Steps<'_>) -> Result<()> {
        self.0.states().connect_by(steps)
    }

    fn modify_by(&self, step: Step) -> Result<()> {
        self.0.states().modify_by(step)
    }

    fn reads_max(&self) -> (u8, u8) {
        self.0.states().reads_max()
    }

    fn place(&self) -> Option<(String, u8)> {
        Some(self.0.states().place())
    }

    fn fail(&self) -> Result<()> {
        self.0.fail()
    }

    fn quiesce(&self) -> Result<bool> {
        self.0.quiesce()?;
        Ok(false)
    }

    fn reset(&self) -> Result<()> {
        self.0.reset()
    }

    fn resets_cqs(&self) -> bool {
        true
    }
}
