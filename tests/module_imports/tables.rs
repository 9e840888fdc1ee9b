//! The tables: the modules of each package, and which of them each may import from. A new module gets a line here first.

/// A module with the modules that it may name; its own name goes without saying. A module of several files that import from each other has the
/// names of all, and is called by the first.
pub type Edges = (&'static str, &'static [&'static str]);

/// A package with the table of its modules.
pub struct Package {
    /// Where its sources are.
    pub folder: &'static str,
    /// What every module may import that stands further down in the table.
    pub common: &'static [&'static str],
    pub modules: &'static [Edges],
}

/// The name of another package that a module may name only if the table says so. What the wire crate has is for all.
pub const SOFTCX: &str = "doorbell_softcx";

/// All packages.
pub const CRATES: &[Package] = &[
    LIBRARY, WIRE, DEVICE, PRELOAD, CAPI, CLI, PYTHON, GPU_CHECK, STANDIN,
];

const LIBRARY: Package = Package {
    folder: "src",
    common: &[],
    modules: &[
        ("setters", &[]),
        // The other half of mlx5 and of all verbs devices; a relay consumes queues as a card does.
        ("verbs", &[]),
        ("nic", &["verbs", SOFTCX]),
        ("stream", &[]),
        // Threads that take turns at what they serve and know nothing of queues; of streams only how to sleep.
        ("proxy", &["stream"]),
        // An executor of programs; it counts, and a thread of its own goes round to its streams. It makes the copies that stand for the software
        // NIC's access to the memory of a GPU.
        ("cuda", &[SOFTCX, "stream", "proxy"]),
        ("region", &["cuda", "nic", "stream", "proxy"]),
        ("endpoint", &["region", "proxy", "stream", "nic"]),
        // The send queue of an endpoint, mapped to a GPU.
        ("device_queue", &["cuda", "endpoint", "region"]),
        // A user of the public interface.
        ("bounce", &["cuda", "endpoint", "region", "stream"]),
        // rdma_cm connects endpoints, and finds the attributes of their steps.
        ("cm", &["endpoint", "nic"]),
        // A user of the public interface, but for reads whose source the stream finds out, and batches with programs of its own.
        ("message", &["endpoint", "region", "stream"]),
        // A thread that takes messages out of queues, and programs that wait for it.
        (
            "matching",
            &["endpoint", "message", "proxy", "region", "stream"],
        ),
        // A user of the public interface, but for the work of host streams.
        ("collective", &["endpoint", "message", "region", "stream"]),
        // Operations as nodes of a CUDA graph: what each launch prepares anew, `cuda` patches into the nodes.
        (
            "graph",
            &[
                "collective",
                "cuda",
                "endpoint",
                "message",
                "region",
                "stream",
            ],
        ),
        // A user of the public interface, but for the deadlines of sockets. Its tests queue messages on streams.
        (
            "group",
            &[
                "collective",
                "endpoint",
                "matching",
                "message",
                "region",
                "stream",
            ],
        ),
    ],
};

const WIRE: Package = Package {
    folder: "crates/wire/src",
    common: &["error"],
    modules: &[
        // The statuses of completions, which errors name.
        ("status", &[]),
        ("error", &["status"]),
        ("verbs", &["status"]),
        ("bytecode", &[]),
        ("mmio", &[]),
        ("mlx5", &["mmio", "bytecode", "verbs"]),
        ("memory", &["mlx5", "verbs"]),
    ],
};

const DEVICE: Package = Package {
    folder: "crates/softcx/src",
    common: &[],
    modules: &[("device", &[]), ("doors", &["device"])],
};

const PRELOAD: Package = Package {
    folder: "crates/softcx/preload/src",
    common: &[],
    modules: &[
        ("state", &[]),
        ("paths", &["state"]),
        ("calls", &["state"]),
        ("access", &["calls", "paths", "state"]),
        ("attributes", &["paths", "state"]),
        ("opens", &["calls", "paths", "state"]),
        ("verbs", &["calls", "state"]),
        ("progress", &["verbs"]),
    ],
};

// The sections of the header over what each of them needs.
const CAPI: Package = Package {
    folder: "crates/capi/src",
    common: &["failure", "boundary", "handle", "argument"],
    modules: &[
        ("code", &[]),
        ("failure", &["code"]),
        ("last_error", &[]),
        ("boundary", &["code", "last_error"]),
        ("handle", &[]),
        ("argument", &[]),
        ("version", &[]),
        ("error", &["code", "last_error"]),
        ("cuda", &[]),
        ("device", &[]),
        ("region", &["device"]),
        ("endpoint", &["device", "error", "region"]),
        ("address_handle", &["endpoint"]),
        ("adopt", &["address_handle", "device", "region"]),
        ("rendezvous", &["endpoint"]),
        ("exchange", &["endpoint"]),
        ("group", &["device", "endpoint", "exchange"]),
        ("store", &["exchange", "group"]),
        ("event", &[]),
        ("stream", &["code", "error", "event", "last_error"]),
        ("trigger_stream", &["stream"]),
        ("work", &["address_handle", "region"]),
        ("ticket", &["error"]),
        ("queue", &["endpoint", "stream", "ticket", "work"]),
        ("value", &["region", "stream", "ticket"]),
        (
            "page_push",
            &["endpoint", "region", "stream", "ticket", "work"],
        ),
        ("cpu", &["endpoint", "ticket", "work"]),
        ("device_queue", &["endpoint", "work"]),
        ("cache", &["device", "region"]),
        ("bounce", &["device", "endpoint", "region"]),
        (
            "message",
            &["device", "endpoint", "error", "group", "stream", "work"],
        ),
        (
            "matcher",
            &[
                "device", "endpoint", "error", "group", "message", "stream", "work",
            ],
        ),
        (
            "communicator",
            &[
                "device", "endpoint", "error", "group", "message", "stream", "work",
            ],
        ),
        (
            "graph",
            &[
                "communicator",
                "endpoint",
                "message",
                "queue",
                "region",
                "stream",
                "ticket",
                "value",
                "work",
            ],
        ),
        ("cm", &["endpoint"]),
    ],
};

// The classes over what each of them needs.
const PYTHON: Package = Package {
    folder: "crates/python/src",
    common: &["error", "detached"],
    modules: &[
        ("error", &[]),
        ("detached", &["error"]),
        ("exit", &[]),
        ("arguments", &[]),
        ("array", &[]),
        ("region", &["arguments"]),
        ("parts", &["arguments", "region"]),
        // What calls take in place of regions: arrays, too.
        ("memory", &["arguments", "array", "region"]),
        ("ticket", &["arguments"]),
        ("endpoint", &["arguments", "parts", "ticket"]),
        ("operations", &["endpoint", "parts"]),
        (
            "stream",
            &[
                "arguments",
                "endpoint",
                "exit",
                "operations",
                "region",
                "parts",
                "ticket",
            ],
        ),
        ("message", &["arguments", "memory", "stream", "ticket"]),
        (
            "device",
            &["arguments", "endpoint", "memory", "message", "region"],
        ),
        (
            "bounce",
            &["arguments", "array", "device", "endpoint", "parts"],
        ),
        (
            "cache",
            &["arguments", "array", "device", "memory", "region"],
        ),
        ("connection_manager", &["arguments", "endpoint"]),
        (
            "collective",
            &[
                "arguments",
                "device",
                "memory",
                "message",
                "stream",
                "ticket",
            ],
        ),
        (
            "matcher",
            &[
                "arguments",
                "device",
                "memory",
                "message",
                "stream",
                "ticket",
            ],
        ),
        (
            "group",
            &[
                "arguments",
                "collective",
                "device",
                "endpoint",
                "matcher",
                "message",
            ],
        ),
        (
            "graph",
            &[
                "operations",
                "arguments",
                "collective",
                "endpoint",
                "memory",
                "message",
                "parts",
                "region",
                "stream",
                "ticket",
            ],
        ),
        // What a task waits for: tickets and events.
        (
            "notice",
            &["collective", "matcher", "message", "stream", "ticket"],
        ),
    ],
};

const CLI: Package = Package {
    folder: "crates/cli/src",
    common: &[],
    modules: &[
        ("stdout", &[]),
        ("environment", &[]),
        ("disasm", &[]),
        ("info", &[]),
        // The only command that starts the simulator's doors.
        ("softcx", &["environment", SOFTCX]),
        // A user of the public interface, but for the wire that the environment gives to the software device.
        ("bench", &["stdout", SOFTCX]),
    ],
};

const GPU_CHECK: Package = Package {
    folder: "tools/gpu-check/src",
    common: &[],
    modules: &[
        // What is found out with a GPU.
        ("gpu", &[]),
        ("attributes", &["gpu"]),
        ("blocking", &["gpu"]),
        ("captures", &["blocking", "gpu"]),
        ("graphs", &["blocking", "gpu"]),
        ("facts", &["gpu"]),
        ("figures", &["gpu"]),
        ("kernels", &["gpu"]),
        ("puts", &["figures", "gpu", "kernels"]),
        ("posts", &["gpu", "kernels", "puts"]),
        ("trigger_latency", &["figures", "gpu", "kernels"]),
        ("emitter", &["figures", "gpu", "kernels"]),
        ("times", &["gpu", "kernels"]),
        // What is run, and what is said of it.
        ("verdicts", &[]),
        ("report", &["verdicts"]),
        ("process", &["report"]),
        ("examples", &["figures", "process", "report"]),
        ("suites", &["process", "report"]),
        ("sanitizer", &["kernels", "process", "report", "suites"]),
        (
            "steps",
            &[
                "attributes",
                "trigger_latency",
                "blocking",
                "captures",
                "emitter",
                "examples",
                "facts",
                "figures",
                "graphs",
                "kernels",
                "posts",
                "process",
                "puts",
                "report",
                "sanitizer",
                "suites",
                "times",
                "verdicts",
            ],
        ),
    ],
};

const STANDIN: Package = Package {
    folder: "tools/cuda-standin/src",
    common: &["call"],
    modules: &[
        ("settings", &[]),
        ("handle", &[]),
        ("held", &["settings"]),
        ("call fault names", &["settings"]),
        ("device", &["settings"]),
        ("reservation pages", &["settings"]),
        ("image", &["settings"]),
        ("life", &[]),
        ("mark", &["life"]),
        ("task", &["life", "mark"]),
        ("graph", &["handle", "task"]),
        ("user_object", &["graph", "handle", "task"]),
        // A context has its streams, a stream has its context and what it is captured into, and a capture has its streams.
        (
            "context capture stream",
            &[
                "graph", "handle", "held", "life", "mark", "settings", "task",
            ],
        ),
        ("current", &["context"]),
        ("streams", &["context", "current", "handle"]),
        (
            "memory host_memory",
            &["context", "current", "device", "reservation", "settings"],
        ),
        (
            "memop",
            &[
                "context", "device", "graph", "held", "life", "memory", "settings", "streams",
                "task",
            ],
        ),
        (
            "copy",
            &[
                "context", "graph", "held", "life", "memory", "streams", "task",
            ],
        ),
        (
            "fill",
            &["context", "graph", "life", "memory", "streams", "task"],
        ),
        ("kernels", &["life", "memop", "memory"]),
        (
            "module",
            &[
                "context", "current", "graph", "handle", "image", "kernels", "life", "settings",
                "streams", "task",
            ],
        ),
        (
            "node",
            &[
                "context", "copy", "current", "fill", "graph", "memop", "module", "task",
            ],
        ),
        (
            "exec",
            &[
                "context", "current", "graph", "handle", "life", "mark", "node", "settings",
                "streams", "task",
            ],
        ),
        (
            "event",
            &[
                "context", "current", "graph", "handle", "life", "mark", "streams", "task",
            ],
        ),
        ("pointer", &["current", "device", "memory"]),
        ("capture_calls", &["context", "streams"]),
        ("graph_calls", &["graph", "node"]),
        (
            "stream_calls",
            &[
                "context", "current", "device", "event", "graph", "held", "streams", "task",
            ],
        ),
        (
            "context_calls",
            &[
                "context", "current", "device", "event", "handle", "memory", "module", "streams",
            ],
        ),
    ],
};
