//! Snapshots and results in S3, Google Cloud Storage and Azure Blob Storage, with the feature
//! `cloud`.

use std::path::Path;

use super::{CliError, Source};

pub(super) const HELP: &str = "set the credentials and the endpoint in the environment, for \
     example AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; \
     GOOGLE_APPLICATION_CREDENTIALS; or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY";

/// Returns the path if it is the URL of a folder in a store.
pub(super) fn url(path: &Path) -> Option<&str> {
    let is_url = |path: &&str| {
        ["s3://", "gs://", "az://"]
            .iter()
            .any(|scheme| path.starts_with(scheme))
    };
    path.to_str().filter(is_url)
}

#[cfg(not(feature = "cloud"))]
pub(super) use absent::Cloud;
#[cfg(feature = "cloud")]
pub(super) use present::Cloud;

#[cfg(not(feature = "cloud"))]
mod absent {
    use std::{convert::Infallible, io};

    use super::{CliError, Source};

    pub(in crate::fleet) struct Cloud(Infallible);

    impl Cloud {
        pub(in crate::fleet) fn open(url: &str) -> Result<Self, CliError> {
            let message = format!("{url}: this harness is built without cloud storage");
            Err(CliError::input(
                message,
                crate::error::with_feature("cloud"),
            ))
        }

        pub(in crate::fleet) fn list(&self, _: usize) -> Result<Vec<Source>, CliError> {
            match self.0 {}
        }

        pub(in crate::fleet) fn fetch(&self, _: &Source) -> io::Result<std::fs::File> {
            match self.0 {}
        }

        pub(in crate::fleet) fn read(&self, _: &str) -> Result<Vec<u8>, CliError> {
            match self.0 {}
        }

        pub(in crate::fleet) fn write(&self, _: &str, _: Vec<u8>) -> Result<(), String> {
            match self.0 {}
        }
    }
}

#[cfg(feature = "cloud")]
mod present {
    use std::fs::File;
    use std::io::{self, Seek as _, Write as _};
    use std::path::{Path as FilePath, PathBuf};

    use object_store::aws::AmazonS3Builder;
    use object_store::azure::MicrosoftAzureBuilder;
    use object_store::gcp::GoogleCloudStorageBuilder;
    use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt as _, RetryConfig, path::Path};
    use tokio::runtime::{Builder, Runtime};

    use super::{CliError, HELP, Source};
    use crate::snapshots;

    /// Bytes that one request fetches, and that a core holds in memory.
    const PART: u64 = 8 << 20;

    pub(in crate::fleet) struct Cloud {
        /// `s3://bucket`
        bucket: String,
        prefix: Path,
        store: Box<dyn ObjectStore>,
        runtime: Runtime,
    }

    impl Cloud {
        pub(in crate::fleet) fn open(url: &str) -> Result<Self, CliError> {
            let invalid =
                |error: &dyn std::fmt::Display| CliError::input(format!("{url}: {error}"), HELP);
            // Fails if another part of the program installed one before, which is then used.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let (scheme, rest) = url.split_once("://").unwrap_or_default();
            let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
            let bucket = format!("{scheme}://{bucket}");
            // Without credentials, each attempt asks the network for some.
            let retry = RetryConfig {
                max_retries: 3,
                ..RetryConfig::default()
            };
            let store: Result<Box<dyn ObjectStore>, object_store::Error> = match scheme {
                "s3" => AmazonS3Builder::from_env()
                    .with_url(&bucket)
                    .with_retry(retry)
                    .build()
                    .map(|store| Box::new(store) as _),
                "gs" => GoogleCloudStorageBuilder::from_env()
                    .with_url(&bucket)
                    .with_retry(retry)
                    .build()
                    .map(|store| Box::new(store) as _),
                _ => MicrosoftAzureBuilder::from_env()
                    .with_url(&bucket)
                    .with_retry(retry)
                    .build()
                    .map(|store| Box::new(store) as _),
            };
            let runtime = Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build();
            Ok(Self {
                bucket,
                prefix: Path::parse(prefix.trim_end_matches('/'))
                    .map_err(|error| invalid(&error))?,
                store: store.map_err(|error| invalid(&error))?,
                runtime: runtime.map_err(|error| {
                    CliError::internal(error.to_string(), "check this machine's limits on threads")
                })?,
            })
        }

        /// The snapshots below the prefix. `number`: that of this bucket.
        pub(in crate::fleet) fn list(&self, number: usize) -> Result<Vec<Source>, CliError> {
            let (mut sources, mut folders) = (Vec::new(), vec![self.prefix.clone()]);
            while let Some(folder) = folders.pop() {
                let listed = self
                    .runtime
                    .block_on(self.store.list_with_delimiter(Some(&folder)));
                let listed =
                    listed.map_err(|error| CliError::input(self.failure(&folder, &error), HELP))?;
                folders.extend(listed.common_prefixes);
                let is_snapshot = |object: &ObjectMeta| {
                    snapshots::is_named_so(FilePath::new(object.location.as_ref()))
                };
                sources.extend(
                    listed
                        .objects
                        .into_iter()
                        .filter(is_snapshot)
                        .map(|object| Source {
                            name: format!("{}/{}", self.bucket, object.location),
                            stamp: object.e_tag.unwrap_or_else(|| {
                                format!("{} {}", object.size, object.last_modified)
                            }),
                            cloud: Some((number, object.size)),
                            path: PathBuf::new(),
                            problem: None,
                        }),
                );
            }
            Ok(sources)
        }

        /// Downloads a snapshot into a file without a name, which ends with this process.
        pub(in crate::fleet) fn fetch(&self, source: &Source) -> io::Result<File> {
            let key = source.name[self.bucket.len()..].trim_start_matches('/');
            let path = Path::parse(key).map_err(io::Error::other)?;
            let size = source.cloud.map_or(0, |(_, size)| size);
            let mut file = tempfile::tempfile()?;
            let mut start = 0;
            while start < size {
                let end = size.min(start + PART);
                let part = self
                    .runtime
                    .block_on(self.store.get_range(&path, start..end));
                file.write_all(&part.map_err(|error| io::Error::other(in_short(&error)))?)?;
                start = end;
            }
            file.rewind()?;
            Ok(file)
        }

        /// Returns the content of a file below the prefix; empty if there is none.
        pub(in crate::fleet) fn read(&self, name: &str) -> Result<Vec<u8>, CliError> {
            let path = self.path(name);
            let read = self
                .runtime
                .block_on(async { self.store.get(&path).await?.bytes().await });
            match read {
                Err(object_store::Error::NotFound { .. }) => Ok(Vec::new()),
                Err(error) => Err(CliError::input(self.failure(&path, &error), HELP)),
                Ok(read) => Ok(read.to_vec()),
            }
        }

        /// Replaces a file below the prefix in one step. Fails with a message.
        pub(in crate::fleet) fn write(&self, name: &str, content: Vec<u8>) -> Result<(), String> {
            let path = self.path(name);
            let written = self.runtime.block_on(self.store.put(&path, content.into()));
            written
                .map(drop)
                .map_err(|error| self.failure(&path, &error))
        }

        fn path(&self, name: &str) -> Path {
            Path::from_iter(self.prefix.parts().chain(Path::from(name).parts()))
        }

        fn failure(&self, path: &Path, error: &object_store::Error) -> String {
            format!("{}/{path}: {}", self.bucket, in_short(error))
        }
    }

    /// The first line, because errors contain the whole response of the server.
    fn in_short(error: &object_store::Error) -> String {
        error
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .chars()
            .take(400)
            .collect()
    }
}
