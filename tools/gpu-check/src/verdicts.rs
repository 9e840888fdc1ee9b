//! The facts that the library relies on and only a GPU can confirm: true, false or unknown, with the evidence of the steps.

use serde_json::{Value, json};

const CONDITIONS: &str = "fact: conditions";
pub const ORDER: &str = "fact: order of stores";
/// What a blocked stream blocks.
pub const CALLS: &str = "fact: calls behind a stream that waits";
pub const STREAMS: &str = "fact: streams beside streams that wait";
pub const CAPTURES: &str = "fact: calls during a capture";
pub const GRAPHS: &str = "fact: a graph whose launch waits";
pub const QUEUED: &str = "fact: calls on a stream that waits";
pub const COPIES: &str = "fact: copies on a stream that waits";
pub const GRAPH_CALLS: &str = "fact: calls about graphs behind a stream that waits";
pub const GRAPHS_BESIDE: &str = "fact: graphs beside graphs that wait";
pub const GRAPHS_MADE: &str = "fact: graphs that are made while a stream waits";

/// The result of a step, or the reason of its failure.
pub struct StepEvidence<'a> {
    pub name: &'a str,
    pub found: &'a Value,
    pub reason: &'a str,
    pub has_failed: bool,
}

/// A fact, the step that tests it, the JSON pointer into the step's result, and how to judge the value there.
type Fact = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Value) -> Option<bool>,
);

const COPY: &str = "a copy to the GPU on a stream of high priority";

/// The number of streams that wait when the stream stops.
fn stops_at_eight(found: &Value) -> Option<bool> {
    Some(found.as_u64()? == 8)
}

/// The step has measured how long after its condition a wait ended.
fn was_let_go(found: &Value) -> Option<bool> {
    Some(found.is_number())
}

const FACTS: [Fact; 36] = [
    (
        "The CPU sees a stream's 32-bit store before the 64-bit store behind it",
        ORDER,
        "/second before first",
        |found| Some(found.as_u64()? == 0),
    ),
    (
        "A call takes 255 memory operations",
        "fact: operations of a call",
        "/255",
        |found| Some(found.is_object()),
    ),
    (
        "A call does not take 256 memory operations",
        "fact: operations of a call",
        "/256",
        |found| Some(found.is_string()),
    ),
    (
        "Registered memory has the same address on the device",
        "fact: mappings",
        "/anonymous/same address",
        Value::as_bool,
    ),
    (
        "32-bit and 64-bit stores to registered memory work",
        "fact: mappings",
        "/anonymous/memops",
        |found| Some(found.as_str()? == "work"),
    ),
    (
        "Registers of a card can be registered as I/O memory by this process",
        "fact: mappings",
        "/registers of a PCI device/registered",
        |found| Some(found.as_str()? == "CUDA_SUCCESS"),
    ),
    (
        "Memory is no I/O memory",
        "fact: mappings",
        "/anonymous as IOMEMORY/memops",
        |found| Some(found.as_str()? != "work"),
    ),
    (
        "A wait for a count holds a stream until the count is there",
        CONDITIONS,
        "/GEQ/let go after us",
        was_let_go,
    ),
    (
        "A wait for a count goes over its wrap",
        CONDITIONS,
        "/GEQ over the wrap/let go after us",
        was_let_go,
    ),
    (
        "A wait for a bit holds a stream until the bit is there",
        CONDITIONS,
        "/AND/let go after us",
        was_let_go,
    ),
    (
        "A wait for the absence of a bit (NOR) holds a stream until the bit is gone",
        CONDITIONS,
        "/NOR/let go after us",
        was_let_go,
    ),
    (
        "Memory of cuMemAllocHost cannot be registered",
        "fact: attributes",
        "/memory of cuMemAllocHost/registered",
        |found| Some(found.as_str()? != "CUDA_SUCCESS"),
    ),
    (
        "Streams can wait for NOR",
        "fact: attributes",
        "/attributes/CAN_USE_STREAM_WAIT_VALUE_NOR",
        |found| Some(found.as_i64()? == 1),
    ),
    (
        "The GPU sees writes of NICs in order",
        "fact: attributes",
        "/attributes/GPU_DIRECT_RDMA_WRITES_ORDERING",
        |found| Some(found.as_i64()? >= 100),
    ),
    (
        "A part of an allocation can be exported as dmabuf",
        "fact: attributes",
        "/dmabuf/64 KiB in it",
        |found| Some(found.as_str()? == "CUDA_SUCCESS"),
    ),
    (
        "cuMemHostUnregister waits for a stream that waits",
        CALLS,
        "/cuMemHostUnregister/waits",
        Value::as_bool,
    ),
    (
        "Other threads cannot copy while cuMemHostUnregister waits",
        CALLS,
        "/cuMemHostUnregister/blocked meanwhile",
        |found| found.get(COPY)?.as_bool(),
    ),
    (
        "cuMemFree waits for a stream that waits",
        CALLS,
        "/cuMemFree/waits",
        Value::as_bool,
    ),
    (
        "Other threads cannot copy while cuMemFree waits",
        CALLS,
        "/cuMemFree/blocked meanwhile",
        |found| found.get(COPY)?.as_bool(),
    ),
    (
        "Streams are made while a stream waits",
        CALLS,
        "/cuStreamCreate/waits",
        |found| Some(!found.as_bool()?),
    ),
    (
        "Fewer streams that wait than there are work queues, 8 by default, stop no other stream",
        STREAMS,
        "/first",
        stops_at_eight,
    ),
    (
        "As many that wait stop a stream of the highest priority as well",
        STREAMS,
        "/of the highest priority",
        stops_at_eight,
    ),
    (
        "Modules are loaded only when no stream waits",
        CALLS,
        "/cuModuleLoadData/waits",
        Value::as_bool,
    ),
    (
        "In relaxed mode the library's calls leave captures valid",
        CAPTURES,
        "/other thread, relaxed",
        |found| Some(found.as_array()?.is_empty()),
    ),
    (
        "Otherwise those that wait, free or unload make captures invalid",
        CAPTURES,
        "/other thread",
        |found| Some(found.as_array()?.contains(&json!("cuModuleUnload"))),
    ),
    (
        "A graph can be patched and launched while its launch before waits",
        GRAPHS,
        "/patch and launch wait for the launch before",
        |found| Some(!found.as_bool()?),
    ),
    (
        "A full stream blocks no call on another stream",
        QUEUED,
        "/blocked meanwhile/a memory operation on another stream",
        |found| Some(!found.as_bool()?),
    ),
    (
        "A full stream blocks no copy on another stream",
        QUEUED,
        "/blocked meanwhile/a copy to the GPU on a stream of high priority",
        |found| Some(!found.as_bool()?),
    ),
    (
        "A query of a full stream waits while a call on it is blocked",
        QUEUED,
        "/blocked meanwhile/cuStreamQuery",
        Value::as_bool,
    ),
    (
        "The question whether a full stream is captured does not wait",
        QUEUED,
        "/blocked meanwhile/cuStreamIsCapturing",
        |found| Some(!found.as_bool()?),
    ),
    (
        "A copy between memories of the host blocks its caller until the stream comes to it",
        COPIES,
        "/host to host, 64 KiB/waits",
        Value::as_bool,
    ),
    (
        "Copies to and from memory of the GPU do not",
        COPIES,
        "",
        |found| {
            let of = |name: &str| found.get(name)?.get("waits")?.as_bool();
            Some(!(of("host to GPU")? || of("GPU to host")? || of("GPU to GPU")?))
        },
    ),
    (
        "Four streams that wait in front of copies from the GPU to the host stop such a copy of another stream",
        GRAPHS_BESIDE,
        "/beside streams with a copy from GPU to host",
        |found| Some(found.get("that wait")?.as_u64()? == 4),
    ),
    (
        "Launching, uploading and destroying graphs waits for no stream",
        GRAPH_CALLS,
        "",
        |found| {
            let calls = found.as_object()?.iter();
            let others = calls.filter(|(call, _)| !call.starts_with("cuGraphInstantiate"));
            let waits: Option<Vec<bool>> = others
                .map(|(_, call)| call.get("waits")?.as_bool())
                .collect();
            let waits = waits.filter(|waits| !waits.is_empty())?;
            Some(!waits.contains(&true))
        },
    ),
    (
        "Instantiating a graph waits for streams that wait, once the driver needs more memory",
        GRAPHS_MADE,
        "/graphs of 32 nodes, memory operations, instantiated/graphs until the caller is blocked",
        |found| Some(found.is_number()),
    ),
    (
        "Other threads cannot do anything on the GPU while it waits",
        GRAPHS_MADE,
        "/graphs of 32 nodes, memory operations, instantiated/blocked meanwhile",
        |found| {
            found
                .as_object()?
                .values()
                .try_fold(true, |all, call| Some(all && call.as_bool()?))
        },
    ),
];

/// A row for each fact.
pub fn verdicts(steps: &[StepEvidence<'_>]) -> Vec<Value> {
    let verdict = |(fact, name, place, judge): &Fact| {
        let step = steps.iter().find(|step| step.name == *name);
        let found = step.and_then(|step| step.found.pointer(place));
        let verdict = match found.and_then(judge) {
            Some(true) => "true",
            Some(false) => "false",
            // The step has no such result; its reason is the evidence.
            None if step.is_some_and(|step| step.has_failed) => "unknown: the step failed",
            None => "unknown",
        };
        let reason = step.map(|step| json!(step.reason));
        json!({
            "fact": fact,
            "verdict": verdict,
            "step": name,
            "evidence": found.cloned().or(reason).unwrap_or_else(|| json!("the step did not run")),
        })
    };
    FACTS.iter().map(verdict).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_is_true_false_or_unknown() {
        let shown = |name, found, reason| StepEvidence {
            name,
            found,
            reason,
            has_failed: *found == Value::Null,
        };
        let freed = json!({"cuMemFree": {"waits": true}});
        let late = "2 of 9 seen before what was stored first";
        let rows = verdicts(&[shown(CALLS, &freed, ""), shown(ORDER, &Value::Null, late)]);
        let of = |fact: &str| rows.iter().find(|row| row["fact"] == fact).unwrap();
        let waits = of("cuMemFree waits for a stream that waits");
        assert_eq!(
            (&waits["verdict"], &waits["evidence"]),
            (&json!("true"), &json!(true))
        );
        let order = of("The CPU sees a stream's 32-bit store before the 64-bit store behind it");
        assert_eq!(order["verdict"], "unknown: the step failed");
        assert!(order["evidence"].as_str().unwrap().contains("2 of 9"));
        let graph = of("A graph can be patched and launched while its launch before waits");
        assert_eq!(graph["evidence"], "the step did not run");
    }
}
