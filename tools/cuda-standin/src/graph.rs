//! Graphs: nodes, what each comes after, and an order in which they can be done.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use cudarc::driver::sys::{CUgraph, CUgraphNode};

use crate::call::{CUresult, CudaResult, valid};
use crate::handle::{self, ObjectTable};
use crate::task::{Task, node_type};

/// CUstreamBatchMemOpParams as its words: the operation, the address, the value, the flags. Read so because what comes from C need not
/// be a value of the enumeration.
pub type MemopWords = [u64; 6];

/// What a node does.
#[derive(Clone)]
pub enum NodeWork {
    Empty,
    Task(Arc<dyn Task>),
    /// Memory operations with the words that they came as, for calls that ask for them.
    Memops {
        context: u64,
        words: Vec<MemopWords>,
        task: Arc<dyn Task>,
    },
}

impl NodeWork {
    pub fn of(task: impl Task + 'static) -> NodeWork {
        NodeWork::Task(Arc::new(task))
    }

    /// CUgraphNodeType.
    pub fn kind(&self) -> u32 {
        match self {
            NodeWork::Empty => node_type::EMPTY,
            NodeWork::Task(task) | NodeWork::Memops { task, .. } => task.node_type(),
        }
    }

    pub fn task(&self) -> Option<&Arc<dyn Task>> {
        match self {
            NodeWork::Empty => None,
            NodeWork::Task(task) | NodeWork::Memops { task, .. } => Some(task),
        }
    }
}

#[derive(Clone)]
pub struct Node {
    pub handle: u64,
    pub work: NodeWork,
    /// The handles of those that it comes after.
    pub after: Vec<u64>,
    /// Of what this is a copy in a cloned graph.
    pub original: u64,
}

/// Something that a graph, its copies and their launches keep.
pub type KeptObject = Arc<dyn std::any::Any + Send + Sync>;

pub struct Graph {
    pub handle: u64,
    nodes: Mutex<Vec<Node>>,
    /// What it keeps of the program's: references of user objects.
    kept: Mutex<Vec<KeptObject>>,
    /// A stream is being captured into it.
    pub capturing: AtomicBool,
}

static GRAPHS: ObjectTable<Graph> = ObjectTable::new();
/// The graph of each node.
static NODES: ObjectTable<Graph> = ObjectTable::new();

/// What graph functions return for an invalid handle.
const WRONG: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

pub fn find(handle: CUgraph) -> CudaResult<Arc<Graph>> {
    GRAPHS.get(handle).ok_or(WRONG)
}

/// The graph that a node is in.
pub fn find_of(node: CUgraphNode) -> CudaResult<Arc<Graph>> {
    NODES.get(node).ok_or(WRONG)
}

pub fn create() -> Arc<Graph> {
    let graph = Arc::new(Graph {
        handle: handle::fresh(),
        nodes: Mutex::default(),
        kept: Mutex::default(),
        capturing: AtomicBool::new(false),
    });
    GRAPHS.insert(graph.handle, graph.clone());
    graph
}

impl Graph {
    pub fn nodes(&self) -> MutexGuard<'_, Vec<Node>> {
        self.nodes
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn keep(&self, what: KeptObject) {
        self.all_kept().push(what);
    }

    fn all_kept(&self) -> MutexGuard<'_, Vec<KeptObject>> {
        self.kept
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What it keeps, for a copy.
    pub fn kept(&self) -> Vec<KeptObject> {
        self.all_kept().clone()
    }

    /// Adds a node after others of this graph, each named once.
    pub fn add(self: &Arc<Graph>, work: NodeWork, after: &[u64]) -> CudaResult<u64> {
        let mut nodes = self.nodes();
        let known = |node: &u64| nodes.iter().any(|other| other.handle == *node);
        valid(
            after.iter().all(known) && after.iter().collect::<HashSet<_>>().len() == after.len(),
        )?;
        let handle = handle::fresh();
        nodes.push(Node {
            handle,
            work,
            after: after.to_vec(),
            original: 0,
        });
        NODES.insert(handle, self.clone());
        Ok(handle)
    }

    /// Takes a node away, and the edges from and to it.
    pub fn remove(&self, node: CUgraphNode) -> CudaResult {
        valid(!self.capturing.load(Ordering::Acquire))?;
        NODES.remove(node).ok_or(WRONG)?;
        let mut nodes = self.nodes();
        nodes.retain(|other| other.handle != node as u64);
        for other in nodes.iter_mut() {
            other.after.retain(|before| *before != node as u64);
        }
        Ok(())
    }

    /// Takes its handle and those of its nodes away. What was instantiated from it stays.
    pub fn destroy(&self) {
        GRAPHS.remove(self.handle as CUgraph);
        self.all_kept().clear();
        for node in self.nodes().iter() {
            NODES.remove(node.handle as CUgraphNode);
        }
    }

    /// A copy with handles of its own.
    pub fn copy(&self) -> Arc<Graph> {
        let copy = create();
        let nodes = self.nodes();
        let fresh: Vec<u64> = nodes.iter().map(|_| handle::fresh()).collect();
        let renamed = |old: &u64| {
            let index = nodes.iter().position(|node| node.handle == *old);
            index.map(|index| fresh[index])
        };
        *copy.nodes() = nodes
            .iter()
            .zip(&fresh)
            .map(|(node, handle)| Node {
                handle: *handle,
                work: node.work.clone(),
                after: node.after.iter().filter_map(renamed).collect(),
                original: node.handle,
            })
            .collect();
        *copy.all_kept() = self.kept();
        for handle in &fresh {
            NODES.insert(*handle, copy.clone());
        }
        copy
    }

    /// All nodes that these come after, and these.
    pub fn ancestors(&self, of: &[u64]) -> HashSet<u64> {
        let nodes = self.nodes();
        let mut found = HashSet::new();
        let mut left = of.to_vec();
        while let Some(handle) = left.pop() {
            if found.insert(handle) {
                let node = nodes.iter().find(|node| node.handle == handle);
                left.extend(node.into_iter().flat_map(|node| &node.after));
            }
        }
        found
    }
}

/// An order in which all nodes can be done, one of those that there are, by `random`; none if the edges make a circle.
pub fn order(nodes: &[Node], mut random: u64) -> Option<Vec<usize>> {
    let mut done: HashSet<u64> = HashSet::new();
    let mut left: Vec<usize> = (0..nodes.len()).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while !left.is_empty() {
        let ready: Vec<usize> = (0..left.len())
            .filter(|at| {
                nodes[left[*at]]
                    .after
                    .iter()
                    .all(|before| done.contains(before))
            })
            .collect();
        if ready.is_empty() {
            return None;
        }
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let index = left.remove(ready[(random % ready.len() as u64) as usize]);
        done.insert(nodes[index].handle);
        order.push(index);
    }
    Some(order)
}
