//! The machine of a measurement.

/// What tells one machine from another in results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Name of the host.
    pub host: String,
    /// Model name of its processor.
    pub cpu: String,
    /// CPUs that this process may run on.
    pub cpus: usize,
}

impl Machine {
    /// The machine of this process.
    pub fn this() -> Machine {
        let host = read("/proc/sys/kernel/hostname");
        Machine {
            host: host.unwrap_or_else(|| "unknown".into()),
            cpu: cpu_model(&read("/proc/cpuinfo").unwrap_or_default()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// A number for this boot of this host, as containers on it read it too; none where the system does not tell.
pub fn boot_id() -> Option<String> {
    read("/proc/sys/kernel/random/boot_id")
}

fn read(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The first model name in /proc/cpuinfo. Arm kernels give none: then the architecture.
fn cpu_model(cpuinfo: &str) -> String {
    let entries = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let mut models = entries.filter(|(key, _)| matches!(key.trim(), "model name" | "Model"));
    let model = models.next().map(|(_, model)| model.trim());
    model.unwrap_or(std::env::consts::ARCH).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_named_by_their_model_or_architecture() {
        let cpuinfo =
            "processor\t: 0\nmodel\t\t: 17\nmodel name\t: A CPU: 3 GHz\n\nmodel name\t: B\n";
        assert_eq!(cpu_model(cpuinfo), "A CPU: 3 GHz");
        let arm = "processor\t: 0\nBogoMIPS\t: 50.00\n";
        assert_eq!(cpu_model(arm), std::env::consts::ARCH);
    }
}
