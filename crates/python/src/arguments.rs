//! What calls take: times, access rights, and the configuration of endpoints.

use std::str::FromStr;
use std::time::Duration;

use doorbell::{
    Access, Algorithm, BounceConfig, CacheConfig, Condition, Condition64, DataType, EndpointConfig,
    MatcherConfig, MessageConfig, ReduceOp, Region,
};
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

/// A field of a configuration, unless it is `None`.
fn field<'py, T: FromPyObjectOwned<'py>>(
    object: &Bound<'py, PyAny>,
    name: &str,
) -> PyResult<Option<T>> {
    let value = object.getattr(name)?;
    let extracted = value.extract::<Option<T>>();
    extracted.map_err(|error| PyTypeError::new_err(format!("`{name}`: {}", error.into())))
}

/// Takes fields of one type and name.
macro_rules! take {
    ($object:ident, $config:ident, $($name:ident),+) => {
        $(if let Some(value) = field(&$object, stringify!($name))? {
            $config.$name = value;
        })+
    };
}

/// An `EndpointConfig` of Python's.
pub struct Configuration(pub EndpointConfig);

impl<'py> FromPyObject<'_, 'py> for Configuration {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Configuration> {
        let mut config = EndpointConfig::default();
        take!(
            object,
            config,
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

/// A `MessageConfig` of Python's.
#[derive(Default)]
pub struct MessageConfiguration(pub MessageConfig);

impl<'py> FromPyObject<'_, 'py> for MessageConfiguration {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<MessageConfiguration> {
        let mut config = MessageConfig::default();
        take!(object, config, slots, eager_bytes, ahead, max_slices);
        if let Some(endpoint) = object
            .getattr("endpoint")?
            .extract::<Option<Configuration>>()?
        {
            config.endpoint = endpoint.0;
        }
        Ok(MessageConfiguration(config))
    }
}

/// A `MatcherConfig` of Python's.
#[derive(Default)]
pub struct MatcherConfiguration(pub MatcherConfig);

impl<'py> FromPyObject<'_, 'py> for MatcherConfiguration {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<MatcherConfiguration> {
        let mut config = MatcherConfig::default();
        take!(object, config, unexpected, receives);
        let messages = object.getattr("messages")?;
        if let Some(messages) = messages.extract::<Option<MessageConfiguration>>()? {
            config.messages = messages.0;
        }
        Ok(MatcherConfiguration(config))
    }
}

/// A `BounceConfig` of Python's.
#[derive(Default)]
pub struct BounceConfiguration(pub BounceConfig);

impl<'py> FromPyObject<'_, 'py> for BounceConfiguration {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<BounceConfiguration> {
        let mut config = BounceConfig::default();
        take!(object, config, chunk_bytes, slots);
        Ok(BounceConfiguration(config))
    }
}

/// A `CacheConfig` of Python's.
#[derive(Default)]
pub struct CacheConfiguration(pub CacheConfig);

impl<'py> FromPyObject<'_, 'py> for CacheConfiguration {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<CacheConfiguration> {
        let mut config = CacheConfig::default();
        take!(object, config, max_entries, max_bytes);
        Ok(CacheConfiguration(config))
    }
}

/// A name that the library reads, or an enumeration of Python's whose values are such names.
pub struct Named<T>(pub T);

impl<'py, T: FromStr<Err = doorbell::Error>> FromPyObject<'_, 'py> for Named<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Named<T>> {
        let name: String = match object.getattr_opt("value")? {
            Some(value) => value.extract()?,
            None => object.extract()?,
        };
        let found = name.parse();
        found
            .map(Named)
            .map_err(|error| to_exception(object.py(), error))
    }
}

/// What a reduction does.
pub type NamedOp = Named<ReduceOp>;
/// The type of its items.
pub type NamedType = Named<DataType>;
/// How a collective operation is carried out.
pub type NamedAlgorithm = Named<Algorithm>;

/// What a wait for a word compares by.
#[derive(Clone, Copy)]
pub enum Comparison {
    GreaterOrEqual,
    Equal,
    And,
    Nor,
}

impl Comparison {
    pub fn of_name(name: &str) -> PyResult<Comparison> {
        match name {
            ">=" => Ok(Comparison::GreaterOrEqual),
            "==" => Ok(Comparison::Equal),
            "and" => Ok(Comparison::And),
            "nor" => Ok(Comparison::Nor),
            _ => Err(PyValueError::new_err(format!(
                "a condition is \">=\", \"==\", \"and\" or \"nor\", not \"{name}\""
            ))),
        }
    }

    pub fn of32(self, value: u32) -> Condition {
        match self {
            Comparison::GreaterOrEqual => Condition::GreaterOrEqual(value),
            Comparison::Equal => Condition::Equal(value),
            Comparison::And => Condition::And(value),
            Comparison::Nor => Condition::Nor(value),
        }
    }

    pub fn of64(self, value: u64) -> Condition64 {
        match self {
            Comparison::GreaterOrEqual => Condition64::GreaterOrEqual(value),
            Comparison::Equal => Condition64::Equal(value),
            Comparison::And => Condition64::And(value),
            Comparison::Nor => Condition64::Nor(value),
        }
    }
}
