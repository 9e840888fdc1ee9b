//! What calls take: times, access rights, and the configuration of endpoints.

use std::time::Duration;

use doorbell::{Access, EndpointConfig, Region};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::error::{class, to_exception};

/// Seconds; `None` and infinity have no limit.
pub fn timeout(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds == f64::INFINITY => Ok(None),
        Some(seconds) => Duration::try_from_secs_f64(seconds).map(Some).map_err(|_| {
            PyValueError::new_err(format!(
                "a timeout is a number of seconds from 0, not {seconds}"
            ))
        }),
    }
}

/// The deadline of a wait on a stream, if the call names one.
pub fn deadline(seconds: Option<f64>) -> PyResult<Option<Option<Duration>>> {
    seconds.map(|seconds| timeout(Some(seconds))).transpose()
}

/// A part of a region that it keeps.
pub struct RegionPart {
    pub region: Region,
    pub offset: u64,
    pub len_bytes: u64,
}

/// Access rights: an `Access`, or its number.
pub fn access(rights: Option<u32>, default: Access) -> PyResult<Access> {
    let Some(bits) = rights else {
        return Ok(default);
    };
    Access::from_bits(bits).ok_or_else(|| {
        PyValueError::new_err(format!("{bits:#x} has bits that are no access rights"))
    })
}

/// An `Access` of Python's.
pub fn to_access<'py>(py: Python<'py>, access: Access) -> PyResult<Bound<'py, PyAny>> {
    class(py, "doorbell._types", "Access")?.call1((access.bits(),))
}

/// An `EndpointConfig` of Python's.
pub struct Configuration(pub EndpointConfig);

impl<'py> FromPyObject<'_, 'py> for Configuration {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Configuration> {
        fn field<'py, T: FromPyObjectOwned<'py>>(
            object: &Bound<'py, PyAny>,
            name: &str,
        ) -> PyResult<Option<T>> {
            let value = object.getattr(name)?;
            let extracted = value.extract::<Option<T>>();
            extracted.map_err(|error| PyTypeError::new_err(format!("`{name}`: {}", error.into())))
        }
        let mut config = EndpointConfig::default();
        macro_rules! take {
            ($($name:ident),+) => {
                $(if let Some(value) = field(&object, stringify!($name))? {
                    config.$name = value;
                })+
            };
        }
        take!(
            send_depth,
            recv_depth,
            max_segments,
            mtu_bytes,
            ack_timeout,
            retry_count,
            rnr_retry
        );
        if let Some(seconds) = field(&object, "wait_timeout")? {
            config.wait_timeout = timeout(Some(seconds))?;
        }
        if let Some(seconds) = field(&object, "room_timeout")? {
            config.room_timeout = Some(timeout(Some(seconds))?.unwrap_or(Duration::MAX));
        }
        if let Some(name) = field::<String>(&object, "control")? {
            let control = name.parse();
            config.control = Some(control.map_err(|error| to_exception(object.py(), error))?);
        }
        Ok(Configuration(config))
    }
}
