//! What a stream's thread does.

use std::ffi::c_void;
use std::sync::Arc;

use crate::call::{Outcome, as_host_function};
use crate::context::Context;
use crate::copy::Copy;
use crate::exec::Run;
use crate::fill::Fill;
use crate::mark::Mark;
use crate::memop::Memop;
use crate::module::Launch;
use crate::stream::Stream;

#[derive(Clone)]
pub enum Task {
    /// What was queued to these streams up to these places comes first.
    After(Vec<(Arc<Stream>, u64)>),
    Reach(Arc<Mark>),
    Await(Arc<Mark>),
    Memops(Vec<Memop>),
    Copy(Copy),
    Fill(Fill),
    Launch(Launch),
    Host(HostFunction),
    /// A launch of a graph.
    Graph(Run),
}

impl Task {
    /// An error ends all work of the context.
    pub fn run(&self, context: &Arc<Context>) -> Outcome {
        match self {
            Task::After(places) => {
                for (stream, place) in places {
                    stream.wait_until_over(*place, context);
                }
                Ok(())
            }
            Task::Reach(_) => Ok(()),
            Task::Await(mark) => {
                mark.wait(context);
                Ok(())
            }
            Task::Memops(memops) => memops.iter().try_for_each(|memop| memop.run(context)),
            Task::Copy(copy) => copy.run(),
            Task::Fill(fill) => fill.run(),
            Task::Launch(launch) => launch.run(context),
            Task::Host(function) => {
                function.run();
                Ok(())
            }
            Task::Graph(run) => run.run(context),
        }
    }

    /// What is reached with its end.
    pub fn end(&self) -> Option<&Mark> {
        match self {
            Task::Reach(mark) => Some(mark),
            Task::Graph(run) => Some(run.end()),
            _ => None,
        }
    }
}

/// A function of the program with its argument.
#[derive(Clone)]
pub struct HostFunction {
    pub function: unsafe extern "C" fn(*mut c_void),
    pub argument: *mut c_void,
}

// SAFETY: the program gave both for a call on a thread of the driver.
unsafe impl Send for HostFunction {}
// SAFETY: as above.
unsafe impl Sync for HostFunction {}

impl HostFunction {
    fn run(&self) {
        // SAFETY: the program answers for what it gave to cuLaunchHostFunc.
        as_host_function(|| unsafe { (self.function)(self.argument) });
    }
}
