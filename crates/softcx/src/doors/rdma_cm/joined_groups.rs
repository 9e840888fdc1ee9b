//! Which multicast groups identifiers have joined.

use std::collections::HashMap;

/// Groups by the numbers that processes have for them.
#[derive(Debug, Default)]
pub(super) struct JoinedGroups {
    groups: HashMap<u32, JoinedGroup>,
    last: u32,
}

#[derive(Debug)]
struct JoinedGroup {
    /// The identifier that has joined it.
    id: u32,
    events_read: u32,
}

impl JoinedGroups {
    pub(super) fn add(&mut self, id: u32) -> u32 {
        self.last = self.last.wrapping_add(1);
        while self.groups.contains_key(&self.last) {
            self.last = self.last.wrapping_add(1);
        }
        let group = JoinedGroup { id, events_read: 0 };
        self.groups.insert(self.last, group);
        self.last
    }

    /// The identifier that has joined it.
    pub(super) fn id_of(&self, number: u32) -> Option<u32> {
        self.groups.get(&number).map(|group| group.id)
    }

    /// Removes one: how many of its events were read.
    pub(super) fn remove(&mut self, number: u32) -> u32 {
        let group = self.groups.remove(&number);
        group.map_or(0, |group| group.events_read)
    }

    pub(super) fn event_is_read(&mut self, number: u32) {
        if let Some(group) = self.groups.get_mut(&number) {
            group.events_read += 1;
        }
    }

    pub(super) fn forget_id(&mut self, id: u32) {
        self.groups.retain(|_, group| group.id != id);
    }
}
